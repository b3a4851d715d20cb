"""Cutting a model into stages and rows into bands: against brute force, and by their properties."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ditpar.stage import cut

COSTS = st.lists(st.integers(1, 9), min_size=1, max_size=9)


def all_cuts(blocks: int, count: int) -> Iterator[list[int]]:
    """Every way to cut blocks into that many consecutive, non-empty pieces, as sizes."""
    for ends in combinations(range(1, blocks), count - 1):
        yield [b - a for a, b in zip((0, *ends), (*ends, blocks), strict=True)]


def dearness(costs: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """The dearest piece, and how uneven they are."""
    pieces, begin = [], 0
    for size in sizes:
        pieces.append(sum(costs[begin : begin + size]))
        begin += size
    return max(pieces), sum(p * p for p in pieces)


@settings(max_examples=300, deadline=None)
@given(COSTS.flatmap(lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))))
@example(([1, 5, 3, 2, 9], 4))
def test_no_cut_into_stages_is_better(given: tuple[list[int], int]) -> None:
    costs, count = given
    sizes = cut.stages(costs, count)
    assert len(sizes) == count and min(sizes) >= 1 and sum(sizes) == len(costs)
    assert dearness(costs, sizes) == min(dearness(costs, other) for other in all_cuts(len(costs), count))


@pytest.mark.parametrize("count", [0, 4])
def test_stages_without_blocks_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"3 blocks cannot be cut into {count} stages"):
        cut.stages([1, 1, 1], count)


@settings(max_examples=300, deadline=None)
@given(rows=st.integers(1, 200), parts=st.integers(1, 20), grain=st.integers(1, 4), lead=st.floats(0, 300))
def test_bands_cover_all_rows_and_are_as_dear_as_each_other(rows: int, parts: int, grain: int, lead: float) -> None:
    grains = -(-rows // grain)
    if parts > grains:
        with pytest.raises(ValueError, match=f"{rows} rows in steps of {grain} cannot be cut into {parts} bands"):
            cut.bands(rows, parts, grain, lead)
        return
    bands = cut.bands(rows, parts, grain, lead)
    assert len(bands) == parts and (bands[0].lo, bands[-1].hi) == (0, rows)
    assert all(a.hi == b.lo for a, b in pairwise(bands))
    assert all(band.size > 0 for band in bands) and all(band.lo % grain == 0 for band in bands)
    sizes, extra = [-(-band.size // grain) for band in bands], lead / grain
    assert max(sizes[1:], default=0) - min(sizes[1:], default=0) <= 1
    if parts > 1:
        firsts = range(1, grains - parts + 2)
        best = min(max(first + extra, -((first - grains) // (parts - 1))) for first in firsts)
        assert max(sizes[0] + extra, *sizes[1:]) <= best + 0.5


def test_bands_of_a_picture_with_text() -> None:
    assert [band.size for band in cut.bands(4096, 5, lead=512)] == [410, 922, 922, 921, 921]
    assert [band.size for band in cut.bands(128, 4, grain=2)] == [32, 32, 32, 32]
    assert [band.size for band in cut.bands(9, 2, grain=4)] == [8, 1]
