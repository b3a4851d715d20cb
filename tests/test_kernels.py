"""The merge kernel against exact attention over all keys, and the Triton kernel against its torch reference."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ditpar.kernels.merge import merge_reference, merge_triton

SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 4, 33, 16), (2, 2, 16, 64), (1, 3, 17, 80)]
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
            lse = lse.float()
        yield out
        yield lse


@pytest.mark.parametrize("masked", MASKED)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_equals_attention_over_all_keys(shape: tuple[int, ...], masked: str) -> None:
    a, lse_a, b, lse_b, want, want_lse = parts(shape, masked, torch.float32)
    out, lse = merge_reference(a, lse_a, b, lse_b)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_far_apart_weights_do_not_overflow() -> None:
    ones = torch.ones(1, 1, 1, 2)
    for low, high in itertools.product((-1e4, -1e30), (1e4, 1e30, 0.0)):
        out, lse = merge_reference(ones.clone(), torch.full((1, 1, 1), low), ones * 3, torch.full((1, 1, 1), high))
        assert torch.equal(out, ones * 3) and lse.item() == pytest.approx(high)


def interpreted() -> None:
    """Compares both on all shapes; run with TRITON_INTERPRET=1, which triton reads when it is imported."""
    worst: dict[str, float] = {}
    for dtype, shape, masked in itertools.product((torch.float32, torch.bfloat16, torch.float16), SHAPES, MASKED):
        a, lse_a, b, lse_b, *_ = parts(shape, masked, dtype)
        want, want_lse = merge_reference(a.clone(), lse_a, b, lse_b)
        got, got_lse = merge_triton(a.clone(), lse_a, b, lse_b)
        assert got.dtype == dtype and not got.isnan().any() and torch.equal(got_lse.isinf(), want_lse.isinf())
        finite = ~want_lse.isinf()
        error = max(
            float((got.float() - want.float()).abs().max()),
            float((got_lse - want_lse)[finite].abs().max()) if finite.any() else 0.0,
        )
        worst[str(dtype)] = max(worst.get(str(dtype), 0.0), error)
    print(json.dumps(worst))


def test_triton_equals_the_reference_under_its_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed on this platform")
    run = subprocess.run(
        [sys.executable, "-c", "import test_kernels; test_kernels.interpreted()"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    worst = json.loads(run.stdout.splitlines()[-1])
    assert worst["torch.float32"] <= 1e-5 and worst["torch.bfloat16"] <= 4e-2 and worst["torch.float16"] <= 3e-3
