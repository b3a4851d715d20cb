"""Cutting a model into stages, and rows into bands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from ditpar.stage.program import Span


def stages(costs: Sequence[float], count: int) -> list[int]:
    """Sizes of `count` consecutive, non-empty pieces of the blocks, such that the dearest piece is as cheap as can be.

    Among the best cuts the one whose pieces are as even as can be (least sum of squares). Dynamic programme over
    (pieces, blocks).

    Raises ValueError when there are fewer blocks than pieces.
    """
    n = len(costs)
    if not 1 <= count <= n:
        raise ValueError(f"{n} blocks cannot be cut into {count} stages")
    total = [0.0, *accumulate(costs)]
    dearest, _ = _cheapest(total, count, max)
    # Evenness is for a second pass: beginnings with a dearest piece below the final one would hide more even ones.
    _, sizes = _cheapest(total, count, lambda sum_, piece: sum_ + piece * piece if piece <= dearest else inf)
    return sizes


def _cheapest(total: list[float], count: int, add: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """The lowest cost of a cut into `count` pieces, and their sizes.

    Args:
        total: costs of the first 0, 1, ... blocks.
        add: the cost of some pieces and one more, from theirs and the piece's.
    """
    n = len(total) - 1
    best = [0.0] + [inf] * n
    cuts: list[list[int]] = []
    for _ in range(count):
        row, cut = [inf] * (n + 1), [0] * (n + 1)
        for end in range(1, n + 1):
            for begin in range(end):
                found = add(best[begin], total[end] - total[begin])
                if found < row[end]:
                    row[end], cut[end] = found, begin
        best = row
        cuts.append(cut)
    sizes, end = [], n
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return best[n], sizes[::-1]


def bands(rows: int, parts: int, grain: int = 1, lead: float = 0.0) -> list[Span]:
    """Cuts rows into consecutive bands, each a multiple of `grain` (but the last) and as dear as the others.

    Args:
        lead: what the first band carries besides, in rows; it gets so many fewer, but at least one grain.

    Raises ValueError when there are fewer grains than parts.
    """
    grains = -(-rows // grain)
    if parts > grains:
        raise ValueError(f"{rows} rows in steps of {grain} cannot be cut into {parts} bands")
    extra = lead / grain
    first = min(max(round((grains + extra) / parts - extra), 1), grains - parts + 1) if parts > 1 else grains
    rest, larger = divmod(grains - first, max(parts - 1, 1))
    sizes = [first] + [rest + (i < larger) for i in range(parts - 1)]
    ends = [min(e * grain, rows) for e in accumulate(sizes)]
    return [Span(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
