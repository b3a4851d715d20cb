"""Seeded call arguments for the tiny pipelines: prompt embeddings in place of prompts, all shapes odd on purpose."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from PIL import Image

from ditpar.errors import ModelError, RequestError
from ditpar.family import Family

TEXT_WIDTHS = ("joint_attention_dim", "caption_channels", "text_dim")
"""Config keys that hold the width of a prompt embedding, whichever the transformer has."""
MASKS = ("prompt_attention_mask", "prompt_embeds_mask")
SIZE = (112, 80)
"""Height and width in pixels: 7 x 5 tokens at 16 pixels each, which neither 2 nor 3 nor 4 ranks share evenly."""
EDIT_SIZE = (896, 640)
"""The same for the edit pipelines, whose tiny VAE shrinks 64 times (128 pixels a token)."""


def inputs(
    family: Family,
    pipe: Any,
    batch: int = 1,
    size: tuple[int, int] | None = None,
    cfg: bool = True,
    masked: bool = False,
    steps: int = 2,
    seed: int = 0,
    text_tokens: int | tuple[int, int] = 7,
    output_type: str = "latent",
    **extra: Any,
) -> dict[str, Any]:
    """Keyword arguments for `pipe(...)`.

    Args:
        batch: prompts.
        size: (height, width) in pixels.
        cfg: whether classifier-free guidance is on.
        masked: text masks with padding whose length differs between the prompts and between the two branches.
        text_tokens: length of the prompt embeddings, or (prompt, negative prompt).
        extra: further arguments, which win.

    Raises RequestError when masks are asked of a pipeline that takes none, ModelError when it has no such guidance.
    """
    parameters = inspect.signature(type(pipe).__call__).parameters
    if family.cfg.scale not in parameters:
        raise ModelError(f"{family.name}: {type(pipe).__name__} has no argument {family.cfg.scale} (the record's cfg)")
    config = (pipe.transformer or pipe.transformer_2).config
    dtype = (pipe.transformer or pipe.transformer_2).dtype
    random = torch.Generator().manual_seed(seed + 1000)
    width = next(int(config[key]) for key in TEXT_WIDTHS if config.get(key))
    tokens = text_tokens if isinstance(text_tokens, tuple) else (text_tokens, text_tokens)
    mask = next((key for key in MASKS if key in parameters), None)
    if masked and mask is None:
        raise RequestError(f"masked: {type(pipe).__name__} takes no text mask")

    call: dict[str, Any] = {"num_inference_steps": steps, "output_type": output_type}
    for prefix, length, cut in (("", tokens[0], 1), ("negative_", tokens[1], 3)):
        if prefix and not cfg:
            continue
        call[f"{prefix}prompt_embeds"] = torch.randn(batch, length, width, generator=random).to(dtype)
        if mask is not None:
            # Padding differs from prompt to prompt and from branch to branch; one token at least stays.
            lengths = [max(1, length - cut - i) if masked else length for i in range(batch)]
            call[prefix + mask] = (torch.arange(length)[None] < torch.tensor(lengths)[:, None]).long()
        if "pooled_prompt_embeds" in parameters:
            pooled = torch.randn(batch, int(config["pooled_projection_dim"]), generator=random)
            call[f"{prefix}pooled_prompt_embeds"] = pooled.to(dtype)
    call[family.cfg.scale] = 3.0 if cfg else 1.0
    if "negative_prompt" in parameters:
        call["negative_prompt"] = None  # PixArt's default is "", which it would encode
    edit = type(pipe).__name__.startswith("QwenImageEdit")
    call["height"], call["width"] = size or (EDIT_SIZE if edit else SIZE)
    if "num_frames" in parameters:
        call["num_frames"] = 5
    if "use_resolution_binning" in parameters:
        call["use_resolution_binning"] = False
    if "image" in parameters:
        call.update(_image(pipe, parameters, call, random, dtype))
    call["generator"] = torch.Generator().manual_seed(seed)
    return {**call, **extra}


def _image(
    pipe: Any, parameters: Any, call: dict[str, Any], random: torch.Generator, dtype: torch.dtype
) -> dict[str, Any]:
    """The reference or start image, and what keeps a pipeline from enlarging it."""
    if "max_area" in parameters:  # Flux Kontext: 12 reference tokens, given as latents
        reference = torch.randn(1, pipe.latent_channels, 8, 6, generator=random).to(dtype)
        return {"image": reference, "max_area": call["height"] * call["width"]}
    pixels = torch.rand(call["height"], call["width"], 3, generator=random).numpy()
    image: dict[str, Any] = {"image": Image.fromarray((pixels * 255).astype(np.uint8))}
    if "strength" in parameters:  # image to image: 1.0 keeps all steps
        image["strength"] = 1.0
    return image
