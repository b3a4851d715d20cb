"""Requests under plans with stages, for the tests of PipeFusion."""

from __future__ import annotations

from typing import Any

import torch
from parity import distance

import ditpar
from ditpar.conformance import tiny
from ditpar.family import families


def pair(name: str, plan: str, **options: Any) -> tuple[float, int, int, dict[Any, int]]:
    """The same call stock and under a plan: their distance, calls as a whole and in bands, operations that forced."""
    family = families()[name]
    build = options.pop("build", {})
    pipe = tiny.build(family, **build)
    call = tiny.inputs(family, pipe, **options)
    generator = call.get("generator")
    state = generator.get_state() if isinstance(generator, torch.Generator) else None
    want = pipe(**call)[0]
    ditpar.parallelize(pipe, plan)
    if state is not None:
        generator.set_state(state)
    got = pipe(**call)[0]
    calls = pipe._ditpar.calls
    return distance(got, want), calls.synchronous, calls.patched, dict(pipe._ditpar.forced)
