"""Attention of some rows to all rows, whose keys and values may be a step old (PipeFusion, arXiv 2405.14430)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ditpar.attention.site import Local
from ditpar.comm import Group
from ditpar.stage.state import Places, StaleKV

METHOD = "ring"


def stale_attend(
    state: StaleKV,
    layer: int,
    places: Places,
    rows: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    local: Local,
) -> Tensor:
    """Puts own keys and values where they belong, then attends to all of the layer.

    Args:
        places, rows: where own rows are among all `rows`.
        q, k, v: [batch, own rows, heads, head_dim].
        mask: of own keys [batch, own rows].
        local: attention on this device.
    """
    state.write(layer, k, v, mask, places, rows)
    return local(q, *state.view(layer))


def gathered(
    ring: Group, sizes: Sequence[int], k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and mask of all ring ranks, in rank order: as many bytes as a ring sends."""
    both = ring.all_gather(METHOD, torch.cat([k, v], dim=-1), sizes, 1)
    if mask is not None:
        mask = ring.all_gather(METHOD, mask, sizes, 1)
    return both[..., : k.shape[-1]], both[..., k.shape[-1] :], mask
