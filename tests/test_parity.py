"""Every exact plan equals the stock pipeline run beside it, for every shape of every family; and what breaks it shows.

The table of all cells is written to docs/parity.md when DITPAR_WRITE_DOCS is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from parity import Case, parity, possible_sabotages, sabotaged
from world import World, Worlds

from ditpar.conformance.variants import variants
from ditpar.family import families
from ditpar.plan import Plan

EXACT = 1e-5
MOVED = 1e-3
BF16_RATIO = 1.2
UNGUIDED = {"guidance"}
"""Variants that make one call a step, for which cfg=2 is refused."""
ONE_PROMPT = ("QwenImageEditPlusPipeline",)
"""Pipelines that take one prompt a call; they make several images of it."""
TWO = ("ulysses=2", "ring=2", "cfg=2", "data=2", "pipe=2,warmup=99")
THREE = ("ulysses=3", "ring=3", "pipe=3,warmup=99")
FOUR = ("ring=2,ulysses=2", "cfg=2,ulysses=2", "cfg=2,ring=2", "data=2,cfg=2", "data=2,ulysses=2")
PIPES = tuple(f"pipe=2,{axis}=2,warmup=99" for axis in ("cfg", "ulysses", "ring", "data"))
"""Every step of a stage pipeline is whole here; patched steps have tests of their own (test_pipefusion.py)."""


def cases() -> Iterator[Case]:
    for family in families().values():
        for i, variant in enumerate(variants(family)):
            for plan in (*TWO, *THREE, *FOUR, *PIPES) if i == 0 else (*TWO, THREE[0], FOUR[0]):
                degrees = Plan.parse(plan)
                if degrees.cfg > 1 and variant.name in UNGUIDED:
                    continue
                options: tuple[tuple[str, object], ...] = ()
                if degrees.data > 1:
                    options = (("num_images_per_prompt" if variant.pipeline in ONE_PROMPT else "batch", 2),)
                yield Case(family.name, variant.name, plan, options)


CASES = list(cases())
TABLE: dict[Case, dict[str, float]] = {}


def weighed(case: Case) -> object:
    """The edit pipelines enlarge any image to a megapixel: beyond two ranks, they are left to `make test-all`."""
    slow = case.variant in ("reference", "two modulations") and case.family == "qwenimage" and case.plan not in TWO
    return pytest.param(case, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize("case", map(weighed, CASES), ids=str)
def test_parity(case: Case, worlds: Worlds) -> None:
    world: World = worlds(Plan.parse(case.plan).world)
    ranks = world.run(parity, case)
    worst = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    assert worst["fp32"] <= EXACT, worst
    assert min(rank["restored"] for rank in ranks) == 1.0
    assert worst["bf16"] <= BF16_RATIO * worst["stock bf16"], worst
    for kind in possible_sabotages(case):
        worst[kind] = min(world.run(sabotaged, case, kind))
        assert worst[kind] > MOVED, f"{kind} went unnoticed: {worst[kind]:.1e}"
    TABLE[case] = worst


@pytest.mark.slow
def test_table() -> None:
    """The table of docs/parity.md, from what the cases above measured in this run."""
    if set(TABLE) != set(CASES):
        pytest.skip("the table needs all cases of one run")
    text = render()
    assert text.count("\n| ") == len(CASES) + 2  # with the head and the line below it
    if os.environ.get("DITPAR_WRITE_DOCS"):
        (Path(__file__).parent.parent / "docs" / "parity.md").write_text(text)


def render() -> str:
    lines = [
        "# Parity",
        "",
        "Made by `make docs` (tests/test_parity.py). Tiny random-weight models, every rank against the",
        "stock pipeline in the same process. *fp32*: relative L2 to stock; *bf16*: error of ditpar in bf16 against stock in",
        "fp32, over the error that stock in bf16 has; *sabotage*: the smallest distance when the method is broken on purpose",
        "(rows swapped, text counted twice, mask dropped, a message shifted by one row).",
        "",
        "| family | variant | plan | fp32 | bf16 ratio | sabotage |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case, cell in TABLE.items():
        moved = min(value for key, value in cell.items() if key not in ("fp32", "bf16", "stock bf16", "restored"))
        ratio = cell["bf16"] / cell["stock bf16"]
        lines.append(
            f"| {case.family} | {case.variant} | {case.plan} | {cell['fp32']:.1e} | {ratio:.2f} | {moved:.1e} |"
        )
    return "\n".join(lines) + "\n"
