"""Compiled blocks under a plan: as many graphs as stock, none after the first request, and the same picture."""

from __future__ import annotations

import pytest
import torch
from parity import distance
from torch._dynamo.utils import counters
from world import Worlds

import ditpar
from ditpar.conformance import tiny
from ditpar.family import families

COMPILED = 1e-4


def compiled(name: str, plan: str | None, before: bool, backend: str) -> tuple[int, int, float]:
    """Graphs after the first and the second request, and the distance to the eager stock pipeline."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # ranks are forked, and a pool of compilers does not like that
    torch._dynamo.reset()
    counters.clear()
    family = families()[name]
    pipe = tiny.build(family)
    want = pipe(**tiny.inputs(family, pipe))[0]
    if plan and not before:
        ditpar.parallelize(pipe, plan)
    for block in (b for blocks in family.blocks for b in pipe.transformer.get_submodule(blocks)):
        block.compile(fullgraph=True, backend=backend)  # what compile_repeated_blocks does, for models without it too
    if plan and before:
        ditpar.parallelize(pipe, plan)
    pipe(**tiny.inputs(family, pipe))
    first = counters["stats"]["unique_graphs"]
    got = pipe(**tiny.inputs(family, pipe))[0]
    return first, counters["stats"]["unique_graphs"], distance(got, want)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("plan", ["ulysses=2", "ring=2", "cfg=2"])
@pytest.mark.parametrize("name", sorted(families()))
def test_graphs_are_those_of_stock(name: str, plan: str, before: bool, worlds: Worlds) -> None:
    stock, _, _ = worlds(1).run(compiled, name, None, False, "aot_eager", timeout=120)[0]
    for first, second, error in worlds(2).run(compiled, name, plan, before, "aot_eager", timeout=120):
        assert first <= stock and second == first and error <= COMPILED


@pytest.mark.parametrize("name", sorted(families()))
def test_graphs_of_whole_steps_in_stages(name: str, worlds: Worlds) -> None:
    stock, _, _ = worlds(1).run(compiled, name, None, False, "aot_eager", timeout=120)[0]
    before = len(name) % 2 == 0  # both ways are tried, on different families
    for first, second, error in worlds(2).run(compiled, name, "pipe=2,warmup=9", before, "aot_eager", timeout=120):
        assert first <= stock and second == first and error <= COMPILED


def compiled_stages(name: str, plan: str) -> tuple[int, int, float]:
    """Graphs after the first and the second request, and the distance to the same plan with eager blocks."""
    family = families()[name]
    pipe = ditpar.parallelize(tiny.build(family), plan)
    want = pipe(**tiny.inputs(family, pipe, steps=4, size=(64, 64)))[0]
    torch._dynamo.reset()
    counters.clear()
    for block in (b for blocks in family.blocks for b in pipe.transformer.get_submodule(blocks)):
        block.compile(fullgraph=True, backend="aot_eager")
    pipe(**tiny.inputs(family, pipe, steps=4, size=(64, 64)))
    first = counters["stats"]["unique_graphs"]
    got = pipe(**tiny.inputs(family, pipe, steps=4, size=(64, 64)))[0]
    return first, counters["stats"]["unique_graphs"], distance(got, want)


@pytest.mark.parametrize("name", sorted(families()))
def test_graphs_of_patched_steps(name: str, worlds: Worlds) -> None:
    """As many as stock has; where text is part of the sequence, as many again for bands that carry none."""
    stock, _, _ = worlds(1).run(compiled, name, None, False, "aot_eager", timeout=120)[0]
    most = stock * (2 if families()[name].joint else 1)
    for first, second, error in worlds(2).run(compiled_stages, name, "pipe=2,patches=2", timeout=120):
        assert first <= most and second == first and error <= COMPILED


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("flux", "ulysses=2"),
        pytest.param("sd3", "ring=2", marks=pytest.mark.slow),
        pytest.param("qwenimage", "ulysses=2", marks=pytest.mark.slow),
        pytest.param("wan", "ring=2", marks=pytest.mark.slow),
    ],
)
def test_inductor(name: str, plan: str, before: bool, worlds: Worlds) -> None:
    for first, second, error in worlds(2).run(compiled, name, plan, before, "inductor", timeout=280):
        assert second == first and error <= COMPILED
