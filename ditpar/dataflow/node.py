"""Nodes: values that are computed later, band by band, from the values that they were noted with. They never change."""

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


class Node:
    """A value of a flow.

    Args:
        flow: the request that it belongs to.
        meta: a meta tensor with its shape, strides and dtype.
        device: where its value will be.
        row: the dim whose entries are independent of each other.
        after: the number of the last transformer call that it depends on.
        evaluate: computes rows on the rank that owns the value; None for calls and on other ranks.
        view: for a view, what gives it from its base: as a true alias once the base has a value.
        number: counts the nodes of the flow.
        depth: how many operations that may still have to be done lead to it.

    Attributes:
        viewed: whether there may be views of it.
    """

    def __init__(
        self,
        flow: Flow,
        meta: Tensor,
        device: torch.device,
        row: int,
        after: int,
        evaluate: Evaluate | None = None,
        view: tuple[Node, Callable[[Tensor], Tensor]] | None = None,
        number: int = 0,
        depth: int = 0,
    ) -> None:
        self.flow, self.meta, self.device, self.row, self.after = flow, meta, device, row, after
        self.evaluate, self.view, self.number, self.depth = evaluate, view, number, depth
        self.viewed = False
        self._bands: dict[tuple[int, int], Tensor] = {}
        self._value: Tensor | None = None
        self._kept: Tensor | None = None
        self._seen: int | None = None

    @property
    def shape(self) -> torch.Size:
        return self.meta.shape

    @property
    def ndim(self) -> int:
        return self.meta.ndim

    @property
    def rows(self) -> int:
        return self.meta.shape[self.row]

    @property
    def root(self) -> Node:
        """For a view, the node whose memory it shows."""
        return self if self.view is None else self.view[0].root

    @property
    def pending(self) -> bool:
        """Whether there is no whole value yet."""
        return self._value is None and not (self.view is not None and not self.view[0].pending)

    def fill(self, lo: int, hi: int, rows: Tensor) -> None:
        """States rows [lo, hi) of a call's result. The tensor is the node's from then on."""
        want = list(self.shape)
        want[self.row] = hi - lo
        if list(rows.shape) != want or rows.dtype != self.meta.dtype:
            raise AssertionError(
                f"a call promised {want} {self.meta.dtype}, gave {list(rows.shape)} {rows.dtype} for rows {lo} to {hi}"
            )
        self._bands[lo, hi] = rows

    def band(self, lo: int, hi: int) -> Tensor:
        """Rows [lo, hi) on the rank that owns the value. Raises NotReady when the call has not got so far."""
        if not self.pending:
            return self.value().narrow(self.row, lo, hi - lo)
        if lo == hi:
            return torch.empty_like(self.meta.narrow(self.row, lo, 0), device=self.device)
        known = self._bands.get((lo, hi))
        if known is None:
            known = self._assembled(lo, hi)
        if known is None:
            if self.evaluate is None:
                raise NotReady
            known = self.evaluate(lo, hi)
            if hi - lo == self.rows:
                self._bands.clear()
            self._bands[lo, hi] = known
            if self._covers(0, self.rows) is not None:
                self.evaluate = None  # so that histories do not chain for ever
        return known

    def source(self, lo: int, hi: int) -> Tensor:
        """Rows [lo, hi) for an operation that was noted before the value was known, and maybe written to."""
        return self.band(lo, hi) if self.pending else self._original().narrow(self.row, lo, hi - lo)

    def _original(self) -> Tensor:
        if self.view is not None:
            base, apply = self.view
            return apply(base._original())
        return self._kept if self._kept is not None else self.value()

    @property
    def stale(self) -> bool:
        """Whether the value was written to since it became known."""
        return not self.pending and version(self.root.value()) != self.root._seen

    def value(self) -> Tensor:
        """The plain tensor. Runs the pending work if need be; every rank of the request must then ask for it."""
        if self._value is None:
            if self.view is not None:
                base, apply = self.view
                whole = base.value()
                # Inside a dispatch, torch leaves out what makes a view count its base's versions.
                with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                    self._value = apply(whole)
            else:
                self._value = self.flow.whole(self)
                self._seen = version(self._value)
                if not self.flow.hold(self.number):
                    self._kept = self._value.clone()
            self.evaluate, self._bands = None, {}
        return self._value

    def hold(self) -> bool:
        """Evaluates all rows on this rank, so that later writes to what they came from do no harm; whether it could."""
        if self.pending and self.view is None and self.evaluate is not None:
            with suppress(NotReady, StaleError):
                self.band(0, self.rows)
        return not self.pending or self.view is not None or self.evaluate is None

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
        pieces = [self._bands[span].narrow(self.row, a - span[0], b - a) for span, a, b in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.row)


def version(tensor: Tensor) -> int | None:
    """Grows with every write to the tensor or to an alias of it; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def unchanging(tree: Any) -> Any:
    """The tree with copies of the plain tensors whose changes torch does not count."""
    return tree_map_only(Tensor, lambda t: t.clone() if t.is_inference() and not hasattr(t, "_node") else t, tree)
