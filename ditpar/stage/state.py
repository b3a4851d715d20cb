"""What stages keep of a run between its units."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ditpar.stage.program import Span

Places = Sequence[tuple[Span, Span]]
"""Rows of a tensor at hand, and where they are among all rows."""


class StaleKV:
    """Keys and values of all rows for each layer: own rows are overwritten, all are read, whatever their age.

    Kept for one run (one branch of guidance of one model in one request), and dropped with it.
    """

    def __init__(self) -> None:
        self._layers: dict[Hashable, tuple[Tensor, Tensor, Tensor | None]] = {}

    def write(self, layer: Hashable, k: Tensor, v: Tensor, mask: Tensor | None, places: Places, rows: int) -> None:
        """Overwrites rows.

        Args:
            k, v: [batch, own rows, heads, head_dim].
            mask: of own keys, [batch, own rows]; None for none.
            places: where own rows are among all.
            rows: how many rows there are in all.
        """
        known = self._layers.get(layer)
        if known is None:
            shape = (k.shape[0], rows, *k.shape[2:])
            kept = None if mask is None else mask.new_zeros((mask.shape[0], rows))
            known = self._layers[layer] = (k.new_empty(shape), v.new_empty((*shape[:-1], v.shape[-1])), kept)
        keys, values, kept = known
        if keys.shape[0] != k.shape[0] or keys.shape[1] != rows or (kept is None) != (mask is None):
            raise AssertionError(
                f"layer {layer}: its state holds {list(keys.shape)}, not {rows} rows of {list(k.shape)}"
            )
        for (lo, hi), (to, end) in places:
            keys[:, to:end] = k[:, lo:hi]
            values[:, to:end] = v[:, lo:hi]
            if kept is not None and mask is not None:
                kept[:, to:end] = mask[:, lo:hi]

    def view(self, layer: Hashable) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values of all rows, [batch, rows, heads, head_dim], and their mask."""
        return self._layers[layer]

    @property
    def bytes(self) -> int:
        tensors = [t for layer in self._layers.values() for t in layer if isinstance(t, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)
