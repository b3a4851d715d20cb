"""Pictures side by side in one file, with titles."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

CELL, GAP, TITLE, LEFT = 152, 4, 34, 74


def draw(path: Path, columns: list[tuple[str, list[Tensor]]], labels: list[str]) -> None:
    """Writes a PNG of 256 colours: a column for each title, a row for each label.

    Args:
        columns: title and pictures, `[3, height, width]` with values in 0..1.
    """
    font = ImageFont.load_default(11)
    step = CELL + GAP
    whole = Image.new("RGB", (LEFT + step * len(columns), TITLE + step * len(labels)), "white")
    pen = ImageDraw.Draw(whole)
    for row, label in enumerate(labels):
        pen.text((4, TITLE + step * row + CELL // 2), label, "black", font, anchor="lm")
    for column, (title, pictures) in enumerate(columns):
        x = LEFT + step * column
        pen.multiline_text((x, 3), title.replace(": ", ":\n"), "black", font, spacing=2)
        for row, picture in enumerate(pictures):
            image = Image.fromarray((picture.permute(1, 2, 0) * 255).round().byte().numpy())
            whole.paste(image.resize((CELL, CELL), Image.Resampling.LANCZOS), (x, TITLE + step * row))
    whole.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
