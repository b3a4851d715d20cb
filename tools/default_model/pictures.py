"""Stage 1: the icons of the set as 256 x 256 pictures with captions."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

SIDE = 256
_TONE = re.compile(r"-(light|medium|dark|medium-light|medium-dark)$")
_KEPT = {"Animals & Nature", "Food & Drink", "Objects", "Travel & Places", "Activities", "Smileys & Emotion"}
_DROPPED = re.compile(
    r"oclock|thirty|-moon$|moon-face|^moon|button|speaker|bell-with-slash|keycap|-heart$|^heart|-square|-circle|diamond"
    r"|kiss(ing)?-|^cat-with|-cat$(?<!^black-cat)|monkey$|envelope|^page|bookmark|chart|folder|calendar|^mobile|person"
    r"|^man|^woman|^men|^women|calling|index-div|antenna|closed-book|^orange-book|^blue-book|^green-book|locked-with"
    r"|unlocked"
)
"""No people, no signs, no near duplicates such as 24 clocks: nine of ten pictures that the VAE sees are the others."""


def draw(icons: Path, work: Path, limit: int | None = None) -> None:
    """Writes `pictures.npy`, [pictures, 256, 256, 3] uint8, and `pictures.json`, their names, categories and the subset.

    Args:
        icons: the unpacked npm package `@iconify-json/fluent-emoji-flat`.
        limit: only so many pictures, to try the recipe.
    """
    found: dict[str, Any] = json.loads((icons / "icons.json").read_text())
    categories: dict[str, list[str]] = json.loads((icons / "metadata.json").read_text())["categories"]
    category = {name: kind for kind, names in categories.items() for name in names}
    images: list[np.ndarray] = []
    names: list[str] = []
    for name, icon in found["icons"].items():
        if _TONE.search(name) and _TONE.sub("", name) in found["icons"]:
            continue
        if len(names) == limit:
            break
        images.append(_render(icon, found))
        names.append(name)
    subset = [i for i, name in enumerate(names) if category.get(name) in _KEPT and not _DROPPED.search(name)]
    np.save(work / "pictures.npy", np.stack(images))
    facts = {"names": names, "categories": [category.get(name) for name in names], "subset": subset}
    (work / "pictures.json").write_text(json.dumps(facts))
    print(f"{len(names)} pictures, {len(subset)} of them in the subset")


def _render(icon: dict[str, Any], icon_set: dict[str, Any]) -> np.ndarray:
    import resvg_py

    width, height = (icon.get(side, icon_set[side]) for side in ("width", "height"))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{SIDE}" '
        f'height="{SIDE}" viewBox="0 0 {width} {height}">{icon["body"]}</svg>'
    )
    data = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=SIDE, height=SIDE, background="#ffffff"))
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def load(work: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """What `draw` wrote; the pictures stay on disk until they are read."""
    return np.load(work / "pictures.npy", mmap_mode="r"), json.loads((work / "pictures.json").read_text())


def to_tensor(pictures: np.ndarray) -> torch.Tensor:
    """[n, height, width, 3] uint8 to [n, 3, height, width] in -1 to 1."""
    return torch.from_numpy(np.array(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1
