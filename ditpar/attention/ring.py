"""Ring attention: key-value blocks travel, partial results are merged (arXiv 2310.01889).

The next block is on its way while the present one is used. Each block carries its own part of the key mask.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ditpar.attention.local import attend_lse
from ditpar.comm import Group
from ditpar.kernels.merge import merge

METHOD = "ring"


def ring_attend(
    group: Group,
    sizes: Sequence[int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Attention of own queries to the keys of all ranks of `group`.

    Args:
        sizes: keys held by each rank.
        q, k, v: own rows, [batch, rows, heads, head_dim].
        mask: own keys' mask [batch, rows], bool or additive.

    Returns:
        [batch, rows, heads, head_dim].
    """
    batch, _, heads, dim = k.shape
    width, extra = 2 * batch * heads * dim, 0 if mask is None else batch
    block = k.new_empty((k.shape[1], width + extra))
    body = block[:, :width].unflatten(1, (2, batch, heads, dim))
    body[:, 0].copy_(k.transpose(0, 1))
    body[:, 1].copy_(v.transpose(0, 1))
    if mask is not None:
        block[:, width:].copy_(mask.transpose(0, 1))

    queries = q.transpose(1, 2)
    out = lse = None
    for step in range(group.size):
        works, following = [], None
        if step + 1 < group.size:
            following = block.new_empty((sizes[(group.index - step - 1) % group.size], width + extra))
            works = group.shift(METHOD, block, following)
        if block.shape[0]:
            keys, values = block[:, :width].unflatten(1, (2, batch, heads, dim)).permute(1, 2, 3, 0, 4)
            block_mask = None if mask is None else block[:, width:].transpose(0, 1).to(mask.dtype)
            part, weight = attend_lse(queries, keys, values, block_mask, scale)
            out, lse = (part, weight) if out is None or lse is None else merge(out, lse, part, weight)
        with group.counters.span("wait", METHOD):
            for work in works:
                work.wait()
        if following is not None:
            block = following
    assert out is not None
    return out.transpose(1, 2)
