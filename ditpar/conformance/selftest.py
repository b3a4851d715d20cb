"""Parity of every exact method on the devices at hand, as one rank runs it."""

from __future__ import annotations

from typing import Any

import torch

from ditpar.conformance.variants import variants
from ditpar.engine.parallel import parallelize, restore
from ditpar.family import families
from ditpar.plan import Plan

EXACT = 1e-5
HALF = 5e-2
"""Bounds of the relative L2 to stock: in fp32, and in bf16 on GPUs, where attention kernels differ between the two."""


def plans(world: int) -> list[str]:
    """The plans that `world` ranks can run; those with stages run every step whole, as only that is exact."""
    found = [f"ulysses={world}", f"ring={world}", "cfg=2", "data=2", "pipe=2,warmup=99"] if world >= 2 else ["single"]
    if world >= 4:
        found += ["ring=2,ulysses=2", "cfg=2,ulysses=2", "cfg=2,pipe=2,warmup=99", "pipe=2,ulysses=2,warmup=99"]
    return [plan for plan in found if Plan.parse(plan).world == world]


def parity(name: str, world: int, device: torch.device) -> list[dict[str, Any]]:
    """Each plan on the plain variant of a family, against the stock pipeline on this rank's device.

    Returns a row per plan and dtype: `family`, `plan`, `dtype`, `error` (relative L2) and whether it is `ok`. GPUs are
    tried in bf16 too, which is where their fused attention is.
    """
    family = families()[name]
    variant = variants(family)[0]
    rows = []
    for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
        pipe = variant.build(family, dtype=dtype).to(device)
        for plan in plans(world):
            options = {"batch": 2} if Plan.parse(plan).data > 1 else {}
            want = pipe(**variant.inputs(family, pipe, **options))[0].double()
            parallelize(pipe, plan)
            got = pipe(**variant.inputs(family, pipe, **options))[0].double()
            restore(pipe)
            error = float((got - want).norm() / want.norm())
            bound = EXACT if dtype == torch.float32 else HALF
            kind = str(dtype).removeprefix("torch.")
            rows.append({"family": name, "plan": plan, "dtype": kind, "error": error, "ok": error <= bound})
    return rows
