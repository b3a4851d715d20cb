"""The merge kernel against exact attention over all keys, and the Triton kernel against its torch reference."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ditpar.kernels.merge import merge, merge_reference, merge_triton

SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 4, 33, 16), (2, 2, 16, 64), (1, 3, 17, 80)]
Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
MASKED = ["neither", "a", "b", "both"]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Exact attention and lse in fp64; rows without keys give 0 and -inf."""
    scores = (q.double() @ k.double().mT).masked_fill(~mask[:, None, None, :], float("-inf"))
    lse = scores.logsumexp(-1)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v.double(), lse


def parts(shape: tuple[int, ...], masked: str, dtype: torch.dtype, seed: int = 0) -> Iterator[Tensor]:
    """(out, lse) of two blocks of keys as attention returns them, then of both together in fp64."""
    random = torch.Generator().manual_seed(seed)
    batch, heads, _, dim = shape
    q = torch.randn(shape, generator=random) * 3
    k, v = (torch.randn((batch, heads, 12, dim), generator=random) for _ in range(2))
    keep = torch.rand((batch, 12), generator=random) > 0.3
    keep[:, 0] = keep[:, -1] = True
    for name, side in (("a", slice(0, 5)), ("b", slice(5, 12))):
        if masked in (name, "both"):
            keep[0, side] = False
    for side in (slice(0, 5), slice(5, 12), slice(0, 12)):
        out, lse = attention(q, k[:, :, side], v[:, :, side], keep[:, side])
        if side.stop - side.start < 12:
            out = out.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)  # [batch, tokens, heads, head_dim] memory
            lse = lse.float().mT.contiguous().mT  # [batch, tokens, heads] memory
        yield out
        yield lse


@pytest.mark.parametrize("masked", MASKED)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_equals_attention_over_all_keys(shape: tuple[int, ...], masked: str) -> None:
    a, lse_a, b, lse_b, want, want_lse = parts(shape, masked, torch.float32)
    out, lse = merge_reference(a, lse_a, b, lse_b)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def far_apart(merge: Merge) -> None:
    """Whoever has all the weight wins, in either place and at any size; equal weights give the mean."""
    ones, inf = torch.ones(1, 1, 1, 2), float("inf")
    for low, high in itertools.product((-inf, -1e30, -1e4), (-1e3, 0.0, 1e4, 1e30)):
        less, more = torch.full((1, 1, 1), low), torch.full((1, 1, 1), high)
        for sides in ((ones.clone(), less, ones * 3, more), (ones * 3, more, ones.clone(), less)):
            out, lse = merge(*sides)
            assert torch.equal(out, ones * 3) and lse.item() == pytest.approx(high), (low, high)
    for size in (-1e30, -1e4, 0.0, 1e4, 1e30):
        out, lse = merge(ones.clone(), torch.full((1, 1, 1), size), ones * 3, torch.full((1, 1, 1), size))
        assert torch.equal(out, ones * 2) and lse.item() == pytest.approx(size + math.log(2)), size


def test_far_apart_weights_do_not_overflow() -> None:
    far_apart(merge_reference)


def interpreted() -> None:
    """Compares both, and the kernel with the truth; run with TRITON_INTERPRET=1, read when the kernel is made."""
    far_apart(merge_triton)
    worst: dict[str, float] = {}
    for dtype, shape, masked in itertools.product((torch.float32, torch.bfloat16, torch.float16), SHAPES, MASKED):
        a, lse_a, b, lse_b, truth, _ = parts(shape, masked, dtype)
        want, want_lse = merge_reference(a.clone(), lse_a, b, lse_b)
        into = a.clone()
        got, got_lse = merge(into, lse_a, b, lse_b)
        assert got is into and got.dtype == dtype and not got.isnan().any()
        assert torch.equal(got_lse.isinf(), want_lse.isinf())
        finite = ~want_lse.isinf()
        error = max(
            float((got.float() - want.float()).abs().max()),
            float((got.double() - truth).abs().max()),
            float((got_lse - want_lse)[finite].abs().max()) if finite.any() else 0.0,
        )
        worst[str(dtype)] = max(worst.get(str(dtype), 0.0), error)
    print(json.dumps(worst))


def without_triton() -> None:
    """`merge` where the kernel is wanted but triton is not installed."""
    sys.modules["triton"] = None  # type: ignore[assignment]
    a, lse_a, b, lse_b, truth, _ = parts(SHAPES[1], "a", torch.float32)
    torch.testing.assert_close(merge(a, lse_a, b, lse_b)[0].double(), truth, rtol=1e-5, atol=1e-5)


def run_interpreted(function: str) -> str:
    """What a function of this file prints in a process of its own with TRITON_INTERPRET=1."""
    run = subprocess.run(
        [sys.executable, "-c", f"import test_kernels; test_kernels.{function}()"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_triton_equals_the_reference_under_its_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed on this platform")
    worst = json.loads(run_interpreted("interpreted").splitlines()[-1])
    assert worst["torch.float32"] <= 1e-5 and worst["torch.bfloat16"] <= 4e-2 and worst["torch.float16"] <= 3e-3


def test_without_triton_plain_torch_merges() -> None:
    run_interpreted("without_triton")
