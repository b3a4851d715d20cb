"""Stage 6: a sheet of what the model draws, and whether the nearest picture is the one that was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FluxPipeline
from PIL import Image

from default_model import pictures
from default_model.export import DEFAULTS

COLUMNS, BATCH = 12, 12


def evaluate(work: Path, captions: list[str], steps: int) -> None:
    """Draws each caption with `model/`, writes `samples.png` and prints hits and PSNR to the picture asked for."""
    pipe = FluxPipeline.from_pretrained(work / "model", torch_dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    found = torch.load(work / "latents.pt")
    captions = [caption for caption in captions if caption in found["captions"]]
    references = (pictures.to_tensor(pictures.load(work)[0][found["pictures"]]) + 1) / 2
    small = F.avg_pool2d(references, 4).flatten(1)
    sheet, hits, decibels = [], 0, []
    for start in range(0, len(captions), BATCH):
        part = captions[start : start + BATCH]
        generators = [torch.Generator().manual_seed(1000 + start + i) for i in range(len(part))]
        options = {**DEFAULTS, "negative_prompt": [""] * len(part), "num_inference_steps": steps}
        images = pipe(part, generator=generators, output_type="np", **options).images
        for caption, image in zip(part, torch.from_numpy(images).permute(0, 3, 1, 2).float(), strict=True):
            nearest = int((small - F.avg_pool2d(image, 4).flatten()).square().mean(1).argmin())
            own = found["captions"].index(caption)
            hits += found["captions"][nearest] == caption
            decibels.append(-10 * float((image - references[own]).square().mean().log10()))
            sheet.append(image)
    print(f"{hits} of {len(captions)} nearest to their own picture, median {np.median(decibels):.1f} dB")
    white = torch.ones_like(references[0])
    sheet += [white] * (-len(sheet) % COLUMNS)
    rows = [torch.cat(sheet[i : i + COLUMNS], 2) for i in range(0, len(sheet), COLUMNS)]
    pixels = (torch.cat(rows, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(work / "samples.png")
