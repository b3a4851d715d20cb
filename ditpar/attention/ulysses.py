"""Ulysses: all-to-all between heads and tokens around an ordinary attention (DeepSpeed-Ulysses, arXiv 2309.14509).

Every rank holds some rows of all heads before, all rows of some heads in between, its rows of all heads after. q, k, v
(and a key mask) travel in one message per peer. Rows arrive in rank order, which attention does not mind as long as
the mask is in the same order. Heads and rows need not divide by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ditpar.comm import Group
from ditpar.dataflow.partition import split, start

METHOD = "ulysses"


def ulysses_attend(
    group: Group,
    sizes: Sequence[int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Attention over the rows of all ranks of `group`.

    Args:
        sizes: rows held by each rank.
        q, k, v: own rows, [batch, rows, heads, head_dim].
        mask: own keys' mask [batch, rows], bool or additive.
        attend: (q, k, v, mask) over [batch, all rows, own heads, head_dim] -> the same shape as q.

    Returns:
        own rows, [batch, rows, heads, head_dim].
    """
    batch, rows, heads, dim = q.shape
    owned = split(heads, group.size)
    mine = owned[group.index]
    extra = 0 if mask is None else batch
    # One flat row per token, so that a peer's rows are one contiguous piece of the receive buffer.
    width = 3 * batch * mine * dim
    gathered = q.new_empty((sum(sizes), width + extra))
    parts = list(gathered.split(list(sizes)))
    send: list[Tensor | None] = []
    for peer, count in enumerate(owned):
        first = start(owned, peer)
        piece = parts[peer] if peer == group.index else q.new_empty((rows, 3 * batch * count * dim + extra))
        body = piece[:, : 3 * batch * count * dim].unflatten(1, (3, batch, count, dim))
        for i, x in enumerate((q, k, v)):
            body[:, i].copy_(x[:, :, first : first + count].transpose(0, 1))
        if mask is not None:
            piece[:, -batch:].copy_(mask.transpose(0, 1))
        send.append(piece)
    group.exchange(METHOD, send, parts)
    whole = gathered[:, :width].unflatten(1, (3, batch, mine, dim))
    all_mask = None
    if mask is not None:
        all_mask = gathered[:, width:].transpose(0, 1).contiguous().to(mask.dtype)
    queries, keys, values = (whole[:, i].transpose(0, 1) for i in range(3))
    out = attend(queries, keys, values, all_mask)

    back = out.transpose(0, 1)
    results = [q.new_empty((rows, batch, count, dim)) for count in owned]
    outgoing = [piece.contiguous() for piece in back.split(list(sizes))]
    results[group.index] = outgoing[group.index]
    group.exchange(METHOD, outgoing, results)
    return torch.cat(results, dim=2).transpose(0, 1)
