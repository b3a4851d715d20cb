"""PipeFusion: exact when every step is whole; in bands, equal to the same thing worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from staged import against_naive, pair, patched_at_the_same_point
from world import Worlds

from ditpar.conformance.variants import variants
from ditpar.family import families

FAMILIES = ("flux", "sd3", "pixart", "qwenimage", "wan")
SIZE: dict[str, dict[str, Any]] = {"wan": {"num_frames": 17}}
"""Five latent frames, so that there are bands to cut."""
EXACT = 1e-5


def sized(name: str, variant: str = "plain", **options: Any) -> dict[str, Any]:
    edits = name == "qwenimage" and variant in ("reference", "two modulations")  # these choose the size themselves
    return ({} if edits else {"size": (64, 64)}) | SIZE.get(name, {}) | options


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_steps_of_four_stages_are_exact(name: str, worlds: Worlds) -> None:
    """Two and three stages, and hybrids, are in tests/test_parity.py."""
    build = {"num_layers": 4} if name != "flux" else {}
    for error, whole, patched, forced in worlds(4).run(
        pair, name, "pipe=4,split=1/1/1/1,warmup=99", **sized(name, steps=3, build=build)
    ):
        assert error <= EXACT and whole >= 3 and patched == 0 and not forced


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("patches", [2, 3, 4])
def test_a_patched_pass_at_the_point_of_the_warm_up_is_exact(name: str, patches: int, worlds: Worlds) -> None:
    for distances in worlds(2).run(patched_at_the_same_point, name, f"pipe=2,patches={patches}", **sized(name)):
        assert max(distances) <= EXACT


OTHERS = [(name, v.name) for name in FAMILIES for v in variants(families()[name])[1:]]


@pytest.mark.parametrize(("name", "variant"), OTHERS)
def test_it_is_for_every_variant(name: str, variant: str, worlds: Worlds) -> None:
    plan = "pipe=2,patches=3"
    for distances in worlds(2).run(patched_at_the_same_point, name, plan, variant, **sized(name, variant)):
        assert max(distances) <= EXACT


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("ranks", "plan"), [(2, "pipe=2,patches=3"), (3, "pipe=3,patches=2,warmup=2")])
def test_every_micro_step_is_as_worked_out_by_hand(name: str, ranks: int, plan: str, worlds: Worlds) -> None:
    for error, worst, count in worlds(ranks).run(against_naive, name, plan, **sized(name, steps=4)):
        assert error <= EXACT and worst <= EXACT and count > 4


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("flux", "reference"),
        ("flux", "start image"),
        ("sd3", "dual attention"),
        ("pixart", "masked"),
        ("qwenimage", "masked"),
        ("wan", "token times"),
        ("wan", "start image"),
    ],
)
def test_so_it_is_for_variants(name: str, variant: str, worlds: Worlds) -> None:
    plan = "pipe=2,patches=3"
    for error, worst, count in worlds(2).run(against_naive, name, plan, variant, **sized(name, variant, steps=4)):
        assert error <= EXACT and worst <= EXACT and count > 4
