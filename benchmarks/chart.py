"""A line chart over two logarithmic axes, as a PNG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SIZE, FINE = (1000, 620), 2
"""Pixels of the picture, and how much finer it is drawn."""
LEFT, RIGHT, TOP, BOTTOM = 80, 190, 30, 70
INK, GRID = "#333333", "#dddddd"
COLOURS = ("#d1495b", "#edae49", "#00798c", "#30638e", "#6a4c93")


@dataclass(frozen=True)
class Series:
    """A line, and marks: pairs of values."""

    name: str
    line: Sequence[tuple[float, float]]
    marks: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis; `ticks` are values, of which the outer ones are its ends."""

    title: str
    ticks: Sequence[float]
    label: Callable[[float], str]

    def at(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        low, high = math.log(self.ticks[0]), math.log(self.ticks[-1])
        return (math.log(value) - low) / (high - low)


def draw(path: Path, x: Axis, y: Axis, series: Sequence[Series]) -> None:
    """Writes the chart."""
    image = Image.new("RGB", (SIZE[0] * FINE, SIZE[1] * FINE), "white")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(15 * FINE)

    def place(px: float, py: float) -> tuple[float, float]:
        across, down = SIZE[0] - LEFT - RIGHT, SIZE[1] - TOP - BOTTOM
        return (LEFT + x.at(px) * across) * FINE, (TOP + (1 - y.at(py)) * down) * FINE

    for tick in x.ticks:
        (low, bottom), top = place(tick, y.ticks[0]), place(tick, y.ticks[-1])
        pen.line([(low, bottom), top], GRID, FINE)
        pen.text((low, bottom + 8 * FINE), x.label(tick), INK, font, anchor="ma")
    for tick in y.ticks:
        start, end = place(x.ticks[0], tick), place(x.ticks[-1], tick)
        pen.line([start, end], GRID, FINE)
        pen.text((start[0] - 8 * FINE, start[1]), y.label(tick), INK, font, anchor="rm")
    middle = (LEFT + (SIZE[0] - LEFT - RIGHT) / 2) * FINE
    pen.text((middle, (SIZE[1] - 14) * FINE), x.title, INK, font, anchor="ms")
    pen.text((10 * FINE, 8 * FINE), y.title, INK, font, anchor="la")

    for i, (one, colour) in enumerate(zip(series, COLOURS, strict=False)):
        inside = [(px, py) for px, py in one.line if y.ticks[0] <= py <= y.ticks[-1]]
        pen.line([place(*point) for point in inside], colour, 3 * FINE, joint="curve")
        for point in one.marks:
            (cx, cy), r = place(*point), 6 * FINE
            pen.ellipse([cx - r, cy - r, cx + r, cy + r], colour, "white", FINE)
        line = (TOP + 20 + 26 * i) * FINE
        begin = (SIZE[0] - RIGHT + 14) * FINE
        pen.line([(begin, line), (begin + 22 * FINE, line)], colour, 3 * FINE)
        pen.text((begin + 30 * FINE, line), one.name, INK, font, anchor="lm")
    image.resize(SIZE, Image.Resampling.LANCZOS).save(path, optimize=True)
