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
from torch.utils._pytree import tree_leaves, tree_map_only

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
        number: counts the deferred values of the flow.
        depth: how many operations that may still have to be done lead to it.
    """

    _flow: Flow
    _meta: Tensor
    _row: int
    _after: int
    _evaluate: Evaluate | None
    _view: tuple[Deferred, Callable[[Tensor], Tensor]] | None
    _number: int
    _depth: int
    _bands: dict[tuple[int, int], Tensor]
    _value: Tensor | None
    _seen: int | None

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
        number: int = 0,
        depth: int = 0,
    ) -> Deferred:
        self: Deferred = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        self._flow, self._meta, self._row, self._after = flow, like, row, after
        self._evaluate, self._view, self._number, self._depth = evaluate, view, number, depth
        self._bands, self._value, self._seen = {}, None, None
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
        if lo == hi:
            return torch.empty_like(self._meta.narrow(self._row, lo, 0), device=self.device)
        known = self._bands.get((lo, hi))
        if known is None:
            known = self._assembled(lo, hi)
        if known is None:
            if self._evaluate is None:
                raise NotReady
            known = self._evaluate(lo, hi)
            if hi - lo == self.rows:
                self._bands.clear()
            self._bands[lo, hi] = known
            if self._covers(0, self.rows) is not None:
                self._evaluate = None  # so that histories do not chain for ever
        return known

    def source(self, lo: int, hi: int) -> Tensor:
        """Rows [lo, hi) for an operation that was noted before the value was known.

        Raises StaleError when the value was changed since.
        """
        if self.stale:
            raise StaleError("a deferred value was changed in place before what had been computed from it was needed")
        return self.band(lo, hi)

    @property
    def stale(self) -> bool:
        """Whether the value was written to since it became known."""
        return not self.pending and version(self.value()) != self._seen

    def _covers(self, lo: int, hi: int) -> list[tuple[tuple[int, int], int, int]] | None:
        """Known bands, and the rows of each, that make up [lo, hi); None when some are missing."""
        parts, at = [], lo
        while at < hi:
            found = next(((a, b) for a, b in self._bands if a <= at < b), None)
            if found is None:
                return None
            end = min(found[1], hi)
            parts.append((found, at, end))
            at = end
        return parts

    def _assembled(self, lo: int, hi: int) -> Tensor | None:
        parts = self._covers(lo, hi)
        if parts is None:
            return None
        pieces = [self._bands[span].narrow(self._row, a - span[0], b - a) for span, a, b in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self._row)

    def value(self) -> Tensor:
        """The plain tensor. Runs the pending work if need be; every rank of the request must then ask for it."""
        if self._value is None:
            if self._view is not None:
                base, apply = self._view
                self._value = apply(base.value())
                self._seen = base._seen
                self._evaluate, self._bands, self._view = None, {}, None
            else:
                self._value = self._flow.whole(self)
                self._seen = version(self._value)
                self._evaluate, self._bands = None, {}
                self._flow.hold(self._number)
        return self._value

    def hold(self) -> None:
        """Evaluates all rows on this rank, so that later writes to what they came from do no harm."""
        if self.pending and self._view is None and self._evaluate is not None:
            with suppress(NotReady, StaleError):
                self.band(0, self.rows)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.einsum:
            return _flow(args).einsum(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _flow((args, kwargs)).dispatch(func, args, kwargs or {})

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


def _flow(tree: Any) -> Flow:
    return next(leaf._flow for leaf in tree_leaves(tree) if isinstance(leaf, Deferred))


def resolve(tree: Any) -> Any:
    """The tree with every Deferred replaced by its value."""
    return tree_map_only(Deferred, Deferred.value, tree)


class Captured:
    """Arguments of a call that is to run later, guarded against changes in between."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = unchanging(settled(arguments))
        self.versions = [
            (name, leaf, version(leaf))
            for name, value in self.arguments.items()
            for leaf in tree_leaves(value)
            if isinstance(leaf, Tensor)
        ]

    def get(self) -> dict[str, Any]:
        """The arguments. Raises StaleError when one was written to since."""
        for name, tensor, seen in self.versions:
            if tensor.stale if isinstance(tensor, Deferred) else version(tensor) != seen:
                raise StaleError(f"transformer argument {name} was changed in place before the deferred call ran")
        return dict(self.arguments)


def settled(tree: Any) -> Any:
    """The tree with every Deferred that has a value replaced by it."""
    return tree_map_only(Deferred, lambda d: d if d.pending else d.value(), tree)


def version(tensor: Tensor) -> int | None:
    """Grows with every write to the tensor or to an alias of it; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def unchanging(tree: Any) -> Any:
    """The tree with copies of the tensors whose changes torch does not count."""
    return tree_map_only(Tensor, lambda t: t.clone() if t.is_inference() and not isinstance(t, Deferred) else t, tree)
