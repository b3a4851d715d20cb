"""One rank that plays a pipeline of patches: transformer calls run late, their results come band by band."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ditpar.dataflow.deferred import Captured, Deferred, resolve
from ditpar.dataflow.flow import Flow
from ditpar.engine.undo import Changes, wrap_call
from ditpar.family import Family
from ditpar.methods.root import Arguments, Root, as_stock, innermost, output_shape


def cuts(rows: int, bands: int = 3) -> list[tuple[int, int]]:
    """Uneven spans [lo, hi) of `rows`: each takes about a quarter of what is left, the last one the rest."""
    spans, lo = [], 0
    for left in range(bands, 0, -1):
        hi = rows if left == 1 else lo + (rows - lo + 3) // 4
        spans.append((lo, hi))
        lo = hi
    return spans


class Banded:
    """The pending calls of a pipeline's transformers.

    Attributes:
        flow: its deferred values.
        steps: how often the next call's input was made band by band while the results came in.
    """

    def __init__(self, family: Family, row: int | None = None, bands: int = 3, lazy: bool = True) -> None:
        self.family, self.row, self.bands = family, row, bands
        self.flow = Flow(lambda: self.run(None), lazy=lazy)
        self.pending: list[tuple[Root, Captured, Deferred]] = []
        self.steps = 0

    def run(self, wanted: Deferred | None) -> None:
        """Runs what is pending; `wanted` is the next call's input."""
        calls, self.pending = self.pending, []
        whole = [(inner(resolve(captured.get())), result) for inner, captured, result in calls]
        for spans in zip(*(cuts(result.rows, self.bands) for _, result in whole), strict=True):
            for (value, result), (lo, hi) in zip(whole, spans, strict=True):
                result.fill(lo, hi, value.narrow(result.row, lo, hi - lo).clone())
            if wanted is not None and wanted.rows == whole[-1][1].rows:
                wanted.band(*spans[-1])  # raises NotReady if it needs rows of other bands
        self.steps += wanted is not None
        self.flow.ran()

    def root(self, transformer: Any) -> Root:
        """The transformer's root, deferred."""
        inner = innermost(transformer._call_impl)

        def call(arguments: Arguments) -> Tensor:
            hidden = arguments["hidden_states"]
            if any(self.flow.waits(leaf) for leaf in tree_leaves(arguments)):
                self.run(hidden if self.flow.waits(hidden) else None)
            row = self.row or (1 if self.family.output == "tokens" else hidden.ndim - 2)
            shape = output_shape(self.family, transformer, arguments)
            result = self.flow.call(torch.empty(shape, dtype=hidden.dtype, device="meta"), hidden.device, row)
            self.pending.append((inner, Captured(arguments), result))
            return result

        return call


@contextmanager
def banded(pipe: Any, family: Family, **options: Any) -> Iterator[Banded]:
    """The pipeline's transformers defer their calls inside; `options` are Banded's."""
    changes, played = Changes(), Banded(family, **options)
    try:
        for transformer in (pipe.transformer, getattr(pipe, "transformer_2", None)):
            if transformer is not None:
                root = played.root(transformer)
                wrap_call(changes, transformer, lambda _, t=transformer, r=root: as_stock(family, t, r))
        yield played
    finally:
        changes.undo()
