"""Attention on one device over [batch, tokens, heads, head_dim], with the log-sum-exp that ring merging needs."""

from __future__ import annotations

import torch
from torch import Tensor

from ditpar.errors import PlanError


def key_mask(mask: Tensor | None, keys: int) -> Tensor | None:
    """The mask of a site as one row per sample, [batch, keys], bool (True is kept) or additive.

    Raises PlanError for a mask that has a head or query axis: it cannot be cut by key alone.
    """
    if mask is None:
        return None
    if mask.ndim == 4 and mask.shape[1] == 1 and mask.shape[2] == 1:
        mask = mask[:, 0, 0]
    if mask.ndim != 2 or mask.shape[1] != keys:
        raise PlanError(
            f"attention mask of shape {list(mask.shape)}: ring and ulysses take masks over {keys} local keys only, "
            "[batch, keys] or [batch, 1, 1, keys]; use cfg or data for this request"
        )
    return mask


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as 0 and -inf; an additive one unchanged but for its dtype."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def attend_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention of q to one block of keys, and how much weight the block had.

    Args:
        q, k, v: [batch, heads, tokens, head_dim]; any strides with a dense last dim.
        mask: [batch, keys], bool or additive; None for none.

    Returns:
        out [batch, heads, tokens, head_dim] and lse [batch, heads, tokens] in fp32. A sample whose keys are all masked
        has out 0 and lse -inf.
    """
    bias = None if mask is None else additive(mask, q.dtype)[:, None, None, :]
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
    elif bias is None and q.dtype in (torch.float16, torch.bfloat16):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
    else:
        if bias is not None:
            bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, False, scale=scale
        )
    lse = lse[..., : q.shape[2]].float()
    if bias is None:
        return out, lse
    empty = torch.isneginf(bias).all(dim=-1)
    if empty.any():
        out = out.masked_fill(empty[..., None], 0)
        lse = lse.masked_fill(empty, float("-inf"))
    return out, lse
