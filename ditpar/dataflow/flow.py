"""Flow: the deferred values of one request, and what happens to the operations on them."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from ditpar.dataflow import rules
from ditpar.dataflow.deferred import Deferred, Evaluate, guarded, resolve
from ditpar.errors import StaleError

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


class Flow:
    """Deferred values between the calls of one request.

    Args:
        run: runs all transformer calls that are pending, and then calls `ran`.
        owner: whether this rank holds the values. On others they are ghosts: shapes alone.
        share: gives every rank the owner's tensor (None on the others), of a shape and dtype; needed with ghosts.
        lazy: whether row-local operations wait too. Without, only views do, which is right when all ranks own all.

    Attributes:
        forced: how often an operation that crosses rows made everything pending run, by operation and line of code.
    """

    def __init__(
        self,
        run: Callable[[], None],
        owner: bool = True,
        share: Callable[[Tensor | None, torch.Size, torch.dtype, torch.device], Tensor] | None = None,
        lazy: bool = True,
    ) -> None:
        self.run, self.owner, self.share, self.lazy = run, owner, share, lazy
        self.calls = self.done = 0
        self.forced: Counter[tuple[str, str]] = Counter()
        self._live: weakref.WeakValueDictionary[int, Deferred] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._old = 0

    def call(self, like: Tensor, device: torch.device, row: int) -> Deferred:
        """The result of one more transformer call, to be filled when it runs."""
        self.calls += 1
        return self._new(like, device, row, self.calls)

    def waits(self, value: Any) -> bool:
        """Whether the value depends on calls that have not run."""
        return isinstance(value, Deferred) and value.pending and value._after > self.done

    def ran(self) -> None:
        """All calls so far have run. What has been waiting for longer than a step is evaluated, to end its history."""
        self.done = self.calls
        if self.owner:
            for number, node in list(self._live.items()):
                if number < self._old:
                    node.hold()
        self._old = next(self._numbers)

    def whole(self, node: Deferred) -> Tensor:
        """The node's plain value on every rank."""
        if node._after > self.done:
            self.run()
        value = node.band(0, node.rows) if self.owner else None
        if self.share is not None:
            value = self.share(value, node.shape, node.dtype, node.device)
        assert value is not None
        return value

    def count(self, what: str) -> None:
        self.forced[what, _caller()] += 1

    # -- operations ----------------------------------------------------------------------------------------------------

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation with a Deferred among its arguments: noted, or done on plain tensors."""
        args, kwargs = tree_map_only(Deferred, lambda d: d if d.pending else d.value(), (args, kwargs))
        nodes = rules.deferred((args, kwargs))
        if not nodes:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        if func in rules.LIKE:
            return func(_stand_in(args[0]), *args[1:], **kwargs)
        if self.lazy or func in rules.VIEWS:
            outputs = _on_meta(func, args, kwargs)
            found = rules.local(func, args, kwargs, outputs)
            if found is not None:
                return self._noted(func, args, kwargs, outputs, found)
        if self.lazy:
            self.count(str(func))
        args, kwargs = resolve((args, kwargs))
        return func(*args, **kwargs)

    def einsum(self, equation: Any, *operands: Any) -> Any:
        """torch.einsum before it becomes products that no longer know their rows."""
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = tuple(operands[0])
        operands = tree_map_only(Deferred, lambda d: d if d.pending else d.value(), operands)
        found = rules.einsum(equation, operands) if self.lazy and rules.deferred(operands) else None
        if found is None:
            if self.lazy and rules.deferred(operands):
                self.count("einsum")
            return torch.einsum(equation, *resolve(operands))
        out = torch.einsum(equation, *tree_map(_meta, operands))
        return self._noted(torch.einsum, operands, {}, out, [found])

    def _noted(self, func: Any, args: Any, kwargs: Any, outputs: Any, found: list[rules.Rows]) -> Any:
        nodes = rules.deferred((args, kwargs))
        after = max(node._after for node in nodes)
        device = kwargs.get("device") or nodes[0].device
        plain = [(t, t._version) for t in rules.plain((args, kwargs)) if guarded(t)]
        many = isinstance(outputs, list | tuple)
        made = []
        for i, (out, rows) in enumerate(zip(outputs if many else [outputs], found, strict=True)):
            evaluate = _checked(rows.evaluate, plain, str(func)) if self.owner else None
            view = None
            if func in rules.VIEWS:
                view = nodes[0], _viewed(func, args, kwargs, i if many else None)
            made.append(self._new(out, torch.device(device), rows.dim, after, evaluate, view))
        return type(outputs)(made) if many else made[0]

    def _new(self, like: Tensor, device: torch.device, row: int, after: int, *more: Any) -> Deferred:
        node = Deferred(self, like, device, row, after, *more)
        if self.owner:
            self._live[next(self._numbers)] = node
        return node

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that writes. Whatever was computed from the old values is computed first."""
        self.count(str(func))
        if self.done < self.calls:
            self.run()
        if self.owner:
            for node in list(self._live.values()):
                node.hold()
        args, kwargs = resolve((args, kwargs))
        return func(*args, **kwargs)


def _checked(evaluate: Evaluate, plain: list[tuple[Tensor, int]], what: str) -> Evaluate:
    if not plain:
        return evaluate

    def checked(lo: int, hi: int) -> Tensor:
        if any(tensor._version != version for tensor, version in plain):
            raise StaleError(
                f"a tensor that {what} was given was changed in place before its deferred result was needed"
            )
        return evaluate(lo, hi)

    return checked


def _viewed(func: Any, args: Any, kwargs: Any, pick: int | None) -> Callable[[Tensor], Tensor]:
    rest = args[1:]

    def apply(base: Tensor) -> Tensor:
        out = func(base, *rest, **kwargs)
        return out if pick is None else out[pick]

    return apply


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    kwargs = {k: v for k, v in kwargs.items() if k != "device"}
    if func is torch.ops.aten._to_copy.default:
        kwargs["device"] = "meta"
    args, kwargs = tree_map(_meta, (args, kwargs))
    return func(*args, **kwargs)


def _meta(value: Any) -> Any:
    if isinstance(value, Deferred):
        return value._meta
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _stand_in(node: Deferred) -> Tensor:
    return torch.empty_strided(node.shape, node.stride(), dtype=node.dtype, device=node.device)


def _caller() -> str:
    """The line of the user's, the pipeline's or the scheduler's code that is being run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_HERE, _TORCH)):
        frame = frame.f_back
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
