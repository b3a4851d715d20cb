"""Deferred tensors: the results of transformer calls that have not run yet, and what stock code computed from them.

A Deferred has shape, dtype and device and no data. Row-local operations on it (rules.py) are noted, to be done band by
band once the call has run; any other operation first runs what is pending and goes on with plain tensors. So stock code
is always right, and its steps overlap where it is row-local.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ditpar.errors import StaleError

if TYPE_CHECKING:
    from ditpar.dataflow.flow import Flow

Evaluate = Callable[[int, int], Tensor]
"""Rows [lo, hi) of a value."""


class NotReady(Exception):
    """Rows that depend on rows of a call which have not been computed yet."""


class Deferred(torch.Tensor):
    """A tensor whose value, or whose rows, are computed when they are needed.

    Args:
        flow: the request that it belongs to.
        like: a meta tensor with its shape, strides and dtype.
        device: where its value will be.
        row: the dim whose entries are independent of each other.
        after: the number of the last transformer call that it depends on.
        evaluate: computes rows on the rank that owns the value; None for calls and on other ranks.
        view: for a view, what gives it from its base: as a true alias once the base has a value.
    """

    _flow: Flow
    _meta: Tensor
    _row: int
    _after: int
    _evaluate: Evaluate | None
    _view: tuple[Deferred, Callable[[Tensor], Tensor]] | None
    _bands: dict[tuple[int, int], Tensor]
    _value: Tensor | None

    @staticmethod
    def __new__(
        cls,
        flow: Flow,
        like: Tensor,
        device: torch.device,
        row: int,
        after: int,
        evaluate: Evaluate | None = None,
        view: tuple[Deferred, Callable[[Tensor], Tensor]] | None = None,
    ) -> Deferred:
        self: Deferred = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        self._flow, self._meta, self._row, self._after = flow, like, row, after
        self._evaluate, self._view, self._bands, self._value = evaluate, view, {}, None
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def rows(self) -> int:
        return self._meta.shape[self._row]

    @property
    def pending(self) -> bool:
        """Whether there is no whole value yet."""
        return self._value is None and not (self._view is not None and not self._view[0].pending)

    def fill(self, lo: int, hi: int, rows: Tensor) -> None:
        """States rows [lo, hi) of a call's result."""
        want = list(self.shape)
        want[self._row] = hi - lo
        if list(rows.shape) != want or rows.dtype != self.dtype:
            raise AssertionError(f"a call promised {want} {self.dtype}, gave {list(rows.shape)} {rows.dtype}")
        self._bands[lo, hi] = rows

    def band(self, lo: int, hi: int) -> Tensor:
        """Rows [lo, hi) on the rank that owns the value. Raises NotReady when the call has not got so far."""
        if not self.pending:
            return self.value().narrow(self._row, lo, hi - lo)
        known = self._bands.get((lo, hi))
        if known is None:
            known = self._assembled(lo, hi)
        if known is None:
            if self._evaluate is None:
                raise NotReady
            known = self._bands[lo, hi] = self._evaluate(lo, hi)
            if self._assembled(0, self.rows, make=False) is not None:
                self._evaluate = None  # so that histories do not chain for ever
        return known

    def _assembled(self, lo: int, hi: int, make: bool = True) -> Tensor | None:
        """Rows out of the bands that are known; None when some are missing."""
        parts, at = [], lo
        while at < hi:
            found = next(((a, b) for a, b in self._bands if a <= at < b), None)
            if found is None:
                return None
            end = min(found[1], hi)
            parts.append((found, at, end))
            at = end
        if not make:
            return self._meta
        pieces = [self._bands[span].narrow(self._row, a - span[0], b - a) for span, a, b in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self._row)

    def value(self) -> Tensor:
        """The plain tensor. Runs the pending work if need be; every rank of the request must then ask for it."""
        if self._value is None:
            if self._view is not None:
                base, apply = self._view
                self._value = apply(base.value())
            else:
                self._value = self._flow.whole(self)
            self._evaluate, self._bands, self._view = None, {}, None
        return self._value

    def hold(self) -> None:
        """Evaluates all rows on this rank, so that later writes to what they came from do no harm."""
        if self.pending and self._view is None and self._evaluate is not None:
            with suppress(NotReady):
                self.band(0, self.rows)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.einsum:
            flow = next(a._flow for a in _leaves(args) if isinstance(a, Deferred))
            return flow.einsum(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        flow = next(a._flow for a in _leaves((args, kwargs)) if isinstance(a, Deferred))
        return flow.dispatch(func, args, kwargs)

    # What reads memory without an operation has no dispatch to catch it.
    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self._read("numpy").numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self._read("tolist").tolist()

    def data_ptr(self) -> int:
        return self._read("data_ptr").data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._read("untyped_storage").untyped_storage()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._read("__array__").__array__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read("pickle").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self._read("deepcopy").clone()

    def _read(self, how: str) -> Tensor:
        if self.pending:
            self._flow.count(how)
        return self.value()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Deferred(shape={list(self.shape)}, pending={self.pending})"


def _leaves(tree: Any) -> Any:
    for item in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(item, list | tuple | dict):
            yield from _leaves(item)
        else:
            yield item


def resolve(tree: Any) -> Any:
    """The tree with every Deferred replaced by its value."""
    return tree_map_only(Deferred, Deferred.value, tree)


class Captured:
    """Arguments of a call that is to run later, guarded against changes in between."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.versions = [
            (name, tensor, tensor._version)
            for name, value in arguments.items()
            for tensor in (value.values() if isinstance(value, dict) else [value])
            if guarded(tensor)
        ]

    def get(self) -> dict[str, Any]:
        """The arguments. Raises StaleError when one was written to since."""
        for name, tensor, version in self.versions:
            if tensor._version != version:
                raise StaleError(f"transformer argument {name} was changed in place before the deferred call ran")
        return dict(self.arguments)


def guarded(value: Any) -> bool:
    """Whether writes to the value can be noticed: it is a plain tensor with a version."""
    return isinstance(value, Tensor) and not isinstance(value, Deferred) and not value.is_inference()
