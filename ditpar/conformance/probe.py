"""Looking into a running model, and changing it, for the length of a `with` block: on instances only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle


class Hooks:
    """Adds hooks to module instances."""

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []

    def before(self, module: nn.Module, function: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        """Calls `function(arguments by name)` before the module runs; what it returns takes their place."""
        names = list(inspect.signature(module.forward).parameters)

        def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            changed = function({**dict(zip(names, args, strict=False)), **kwargs})
            return None if changed is None else ((), changed)

        self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(self, module: nn.Module, function: Callable[[Any], Any]) -> None:
        """Calls `function(output)` after the module ran; what it returns, unless None, takes its place."""
        self.handles.append(module.register_forward_hook(lambda _module, _args, output: function(output)))

    def mark(self, module: nn.Module, events: list[str], name: str) -> None:
        """Appends `name` to `events` whenever the module is about to run."""
        self.before(module, lambda _: events.append(name))

    def keep(self, module: nn.Module, outputs: list[Any]) -> None:
        """Appends what the module returns to `outputs`."""
        self.after(module, outputs.append)

    def give(self, module: nn.Module, output: Any) -> None:
        """Puts `output` in place of whatever the module returns."""
        self.after(module, lambda _: output)


@contextmanager
def hooks() -> Iterator[Hooks]:
    """Hooks that are removed at the end."""
    added = Hooks()
    try:
        yield added
    finally:
        for handle in added.handles:
            handle.remove()


@contextmanager
def instead(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Modules that run another function than their own forward."""
    before = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, function in forwards.items():
            vars(module)["forward"] = function
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own


@dataclass(frozen=True)
class Attention:
    """One attention call at a site.

    Attributes:
        site: the site's path.
        q, k, v: [batch, heads, tokens, head_dim], after rotary embedding.
        mask: as the site made it, or None.
    """

    site: str
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None


class Tap(TorchFunctionMode):
    """Catches the attention calls made inside of sites.

    Args:
        sites: modules by path.
        answer: (attention) -> output [batch, heads, tokens, head_dim], or None for the stock result.
    """

    def __init__(
        self, add: Hooks, sites: dict[str, nn.Module], answer: Callable[[Attention], Tensor | None] | None = None
    ) -> None:
        super().__init__()
        self.calls: list[Attention] = []
        self.entered: list[str] = []
        self._answer = answer
        self._inside: list[str] = []
        for path, module in sites.items():
            add.mark(module, self.entered, path)
            add.mark(module, self._inside, path)
            add.after(module, self._leave)

    def _leave(self, _output: Any) -> None:
        self._inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not self._inside:
            return func(*args, **kwargs)
        named = {**dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)), **kwargs}
        q, k, v = named["query"], named["key"], named["value"]
        call = Attention(self._inside[-1], q, k, v, named.get("attn_mask"))
        self.calls.append(call)
        answer = self._answer(call) if self._answer else None
        return func(*args, **kwargs) if answer is None else answer
