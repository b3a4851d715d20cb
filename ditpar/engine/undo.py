"""Changes to instances that can all be undone, in reverse order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Changes:
    """Instance attributes set for a while."""

    _ABSENT = object()

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Sets an attribute in the instance's own dictionary, past any `__setattr__` of its class."""
        own = vars(target)
        before = own.get(name, self._ABSENT)
        own[name] = value

        def back() -> None:
            if before is self._ABSENT:
                own.pop(name, None)
            else:
                own[name] = before

        self._undo.append(back)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def wrap_call(changes: Changes, module: Any, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Leads `module(...)` through `wrapper(call)`.

    `nn.Module.__call__` runs the instance's `_compiled_call_impl` when it has one; so this works on an instance, keeps
    hooks and `module.compile()` inside, and stays outside of what is compiled.
    """
    call = module._compiled_call_impl or module._call_impl
    changes.set(module, "_compiled_call_impl", wrapper(call))
