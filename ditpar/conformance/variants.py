"""The shapes of each family that its record must be right for: other pipelines, configs and kinds of request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ditpar.conformance import tiny
from ditpar.family import Family


@dataclass(frozen=True)
class Variant:
    """One way to build and call a tiny pipeline.

    Attributes:
        name: what is special about it.
        pipeline: pipeline class; None takes the family's first.
        config: overrides for `tiny.build`.
        call: options for `tiny.inputs`.
        several: the option that makes three images in one call.
    """

    name: str
    pipeline: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    several: Mapping[str, Any] = field(default_factory=lambda: {"batch": 3})

    def build(self, family: Family, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        """The stock tiny pipeline."""
        return tiny.build(family, self.pipeline, seed, dtype, **self.config)

    def inputs(self, family: Family, pipe: Any, **options: Any) -> dict[str, Any]:
        """Call arguments; `options` win over the variant's own."""
        return tiny.inputs(family, pipe, **{**self.call, **options})


_PIXART_ALPHA = {
    "sample_size": 128,
    "use_additional_conditions": True,
    "num_attention_heads": 6,  # size conditions take a third of the width each
    "cross_attention_dim": 96,
}

VARIANTS: Mapping[str, tuple[Variant, ...]] = {
    "flux": (
        Variant("plain"),
        Variant("guidance", config={"guidance_embeds": True}, call={"cfg": False}),
        Variant("reference", "FluxKontextPipeline"),
        Variant("start image", "FluxImg2ImgPipeline"),
    ),
    "sd3": (
        Variant("plain"),
        Variant("dual attention", config={"dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}),
        Variant("start image", "StableDiffusion3Img2ImgPipeline"),
    ),
    "pixart": (
        Variant("plain"),
        Variant("masked", call={"masked": True}),
        Variant("alpha", "PixArtAlphaPipeline", call={"masked": True}),
        Variant("size conditions", "PixArtAlphaPipeline", _PIXART_ALPHA),
    ),
    "qwenimage": (
        Variant("plain", call={"text_tokens": (7, 5)}),
        Variant("masked", call={"masked": True, "text_tokens": (9, 6)}),
        Variant("reference", "QwenImageEditPipeline"),
        # The plus pipeline takes one prompt a call.
        Variant(
            "two modulations",
            "QwenImageEditPlusPipeline",
            {"zero_cond_t": True},
            several={"num_images_per_prompt": 3},
        ),
    ),
    "wan": (
        Variant("plain", call={"text_tokens": (7, 5)}),
        Variant("two transformers", config={"boundary_ratio": 0.9}, call={"steps": 3}),
        Variant("token times", "WanImageToVideoPipeline", {"expand_timesteps": True}),
        Variant("start image", "WanImageToVideoPipeline"),
        # Wan 2.1's image-to-video model reads image embeddings before exactly 512 text tokens.
        Variant(
            "image embeddings",
            "WanImageToVideoPipeline",
            {"image_dim": 12, "added_kv_proj_dim": 64},
            {"text_tokens": 512},
        ),
    ),
}
"""By family name; the first of each is the plain one."""


def variants(family: Family) -> tuple[Variant, ...]:
    """A family's variants; a record without any has its first pipeline, plain."""
    return VARIANTS.get(family.name, (Variant("plain"),))
