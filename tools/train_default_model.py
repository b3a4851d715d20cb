"""Trains the bundled model from nothing: `python tools/train_default_model.py --icons PACKAGE --work FOLDER`.

default_model/README.md says what is needed and how long it takes. Stages whose result is in the work folder are
skipped, so that a broken run goes on where it stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from default_model import evaluate, export, flow, latents, pictures, vae

FOCUS = Path(__file__).with_name("default_model") / "focus.txt"


def main() -> None:
    """Runs the stages in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--icons", type=Path, required=True, help="the unpacked @iconify-json/fluent-emoji-flat")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything that is made")
    parser.add_argument("--budget", type=float, default=1.0, help="factor on all training times")
    parser.add_argument("--limit", type=int, help="only so many pictures, to try the recipe")
    parser.add_argument("--steps", type=int, default=28, help="denoising steps of the samples")
    parser.add_argument("--eager", action="store_true", help="compile nothing, to try the recipe")
    given = parser.parse_args()
    work, budget, compiled = given.work, given.budget, not given.eager
    work.mkdir(parents=True, exist_ok=True)
    focus = FOCUS.read_text().splitlines()
    # The broad schedule stops before its end: its low rates would be wasted on captions that are dropped next.
    broad = flow.Schedule(38 * budget, 0.45, stop=24 * budget, compiled=compiled)
    narrow = flow.Schedule(17.5 * budget, 0.33, decay=0.5, warm_up=30, only=frozenset(focus), compiled=compiled)
    stages: list[tuple[str, Callable[[], object]]] = [
        ("pictures.json", lambda: pictures.draw(given.icons, work, given.limit)),
        ("vae_raw", lambda: vae.train(work, 9 * budget)),
        ("latents.pt", lambda: latents.encode(work)),
        ("broad.pt", lambda: flow.train(work, broad, "broad.pt")),
        ("focus.pt", lambda: flow.train(work, narrow, "focus.pt", resume="broad.pt")),
        ("model", lambda: export.export(work, "focus.pt", focus)),
        ("samples.png", lambda: evaluate.evaluate(work, focus, given.steps)),
    ]
    for result, stage in stages:
        if (work / result).exists():
            print(f"{result} is there already", flush=True)
        else:
            print(f"making {result}", flush=True)
            stage()


if __name__ == "__main__":
    main()
