"""Merging two partial attention results by their log-sum-exp: a Triton kernel, and the plain torch it must equal.

With weights w = exp(lse_b) / (exp(lse_a) + exp(lse_b)) = sigmoid(lse_b - lse_a), the merged result is
a + w (b - a) and its lse is log(exp(lse_a) + exp(lse_b)); arXiv 2205.14135, section 3.1, has the recurrence. A side
whose keys are all masked has lse -inf, weight 0 and must be 0, not NaN; when both are, so is the result.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both sides, from attention over each.

    Args:
        out_a, out_b: [batch, heads, tokens, head_dim], any strides. `out_a` may be overwritten.
        lse_a, lse_b: [batch, heads, tokens], fp32.

    Returns:
        out like out_a, computed in fp32, and lse [batch, heads, tokens] in fp32.
    """
    if (out_a.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and _has_triton():
        return merge_triton(out_a, lse_a, out_b, lse_b)
    return merge_reference(out_a, lse_a, out_b, lse_b)


def merge_reference(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """See `merge`. In plain torch."""
    weight = torch.sigmoid(lse_b - lse_a)
    lse = torch.logaddexp(lse_a, lse_b)
    # Only -inf against -inf has no difference; the result of nothing and nothing is nothing.
    weight = weight.nan_to_num_(nan=0.0)[..., None]
    if out_a.dtype == torch.float32:
        return out_a.lerp_(out_b, weight), lse
    return torch.lerp(out_a.float(), out_b.float(), weight).to(out_a.dtype), lse


def merge_triton(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """See `merge`. One program a block of rows; writes into `out_a` and a new lse."""
    import triton

    batch, heads, tokens, dim = out_a.shape
    rows = batch * heads * tokens
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=out_a.device)
    block_rows, block_dim = 16, triton.next_power_of_2(dim)
    with torch.cuda.device_of(out_a):  # Triton launches on the current device, whatever its arguments are on.
        _kernel()[(triton.cdiv(rows, block_rows),)](
            out_a,
            out_b,
            lse_a,
            lse_b,
            lse,
            rows,
            heads,
            tokens,
            dim,
            *out_a.stride(),
            *out_b.stride(),
            *lse_a.stride(),
            *lse_b.stride(),
            BLOCK_ROWS=block_rows,
            BLOCK_DIM=block_dim,
        )
    return out_a, lse


@functools.cache
def _has_triton() -> bool:
    """Whether the kernel can be made: torch for GPUs comes without triton on some platforms."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _kernel() -> Any:
    """The kernel. Made at first use: triton may not be installed, and reads its settings when a kernel is made."""
    import triton
    import triton.language as tl

    @triton.jit
    def merge_kernel(
        a_ptr, b_ptr, lse_a_ptr, lse_b_ptr, lse_ptr, rows, heads, tokens, dim,
        a_b, a_h, a_t, a_d, b_b, b_h, b_t, b_d, la_b, la_h, la_t, lb_b, lb_h, lb_t,
        BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ):  # fmt: skip
        # In 64 bits, as offsets of a long video's batch pass 2**31.
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        col = tl.arange(0, BLOCK_DIM)
        live = row < rows
        token = row % tokens
        head = (row // tokens) % heads
        sample = row // (tokens * heads)
        # A row beyond the end has lse -inf: its weight is 0 and nothing of it is stored.
        lse_a = tl.load(lse_a_ptr + sample * la_b + head * la_h + token * la_t, mask=live, other=float("-inf"))
        lse_b = tl.load(lse_b_ptr + sample * lb_b + head * lb_h + token * lb_t, mask=live, other=float("-inf"))
        top = tl.maximum(lse_a, lse_b)
        safe = tl.where(top == float("-inf"), 0.0, top)
        exp_a = tl.exp(lse_a - safe)
        exp_b = tl.exp(lse_b - safe)
        total = exp_a + exp_b
        weight = tl.where(total > 0, exp_b / tl.where(total > 0, total, 1.0), 0.0)
        tl.store(lse_ptr + row, tl.where(total > 0, safe + tl.log(tl.where(total > 0, total, 1.0)), top), mask=live)
        cell = live[:, None] & (col < dim)[None, :]
        a_at = a_ptr + (sample * a_b + head * a_h + token * a_t)[:, None] + (col * a_d)[None, :]
        b_at = b_ptr + (sample * b_b + head * b_h + token * b_t)[:, None] + (col * b_d)[None, :]
        a = tl.load(a_at, mask=cell, other=0.0).to(tl.float32)
        b = tl.load(b_at, mask=cell, other=0.0).to(tl.float32)
        tl.store(a_at, (a + weight[:, None] * (b - a)).to(a_ptr.dtype.element_ty), mask=cell)

    return merge_kernel
