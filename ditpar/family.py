"""Family: all that ditpar knows about a transformer class, as data. The records are in the folder pipelines/."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ditpar.errors import ModelError

Rows = Literal["image", "text", "joint"]
"""Which tokens a dim counts: image tokens, text tokens, or both in the family's joint order."""

RECORDS = ("flux", "sd3", "pixart", "qwenimage", "wan")


@dataclass(frozen=True)
class Guidance:
    """How the pipeline does classifier-free guidance.

    Attributes:
        style: `batched`, one call with dim 0 doubled; `separate`, two calls a step.
        scale: the pipeline argument that turns guidance on when it exceeds 1.
        needs_negative: guidance also needs `negative_prompt` or its embeddings.
    """

    style: Literal["batched", "separate"]
    scale: str
    needs_negative: bool = False

    def active(self, call: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments (defaults included) computes both branches."""
        scale = call.get(self.scale)
        negative = any(call.get(k) is not None for k in ("negative_prompt", "negative_prompt_embeds"))
        return scale is not None and scale > 1 and (negative or not self.needs_negative)

    @property
    def advice(self) -> str:
        return f"pass {self.scale} above 1" + (" and a negative_prompt (may be empty)" if self.needs_negative else "")


@dataclass(frozen=True)
class Slice:
    """One tensor beside the streams that has a row per token.

    Attributes:
        source: the prologue module (path below the transformer) whose output it is, or `block` for a block argument.
        item: index in the module's output tuple (0 for a bare tensor), or the block argument's name.
        dim: the dim that counts tokens.
        rows: which tokens it counts.
        ndim: sliced only when the tensor has this many dims; None always.
    """

    source: str
    item: int | str
    dim: int
    rows: Rows
    ndim: int | None = None


@dataclass(frozen=True)
class Embed:
    """The module that makes tokens of latents, row by row.

    Attributes:
        module: path below the transformer.
        dim: the dim of its input, of its output and of the latents that counts rows.
    """

    module: str
    dim: int


@dataclass(frozen=True)
class Family:
    """Facts about one transformer class.

    Attributes:
        name: short name, also the record's file name.
        transformer: class name of the transformer in diffusers.
        pipelines: class names of the diffusers pipelines that the family was tested with.
        blocks: block lists in the order they run.
        streams: block arguments that carry token streams [batch, tokens, width], and which tokens.
        returns: the streams that a block returns, in order.
        joint: order of text and image in the joint sequence; None when text is reached by cross-attention.
        sites: attention submodules of a block that mix image rows, and the tokens of their sequence.
        processors: attention processor classes proved to make one attention call each at a site.
        not_empty: functions of the processors' modules that fail on a text of no tokens, which they are spared.
        slices: further per-token tensors.
        exit: the module whose output's dim 1 counts image tokens and is gathered.
        batched: transformer arguments whose dim 0 (or length) is the batch.
        static: transformer arguments equal for all of the batch.
        embed: what makes tokens of latents.
        per_step: modules whose outputs are the same for all image tokens of a call, by path; `*` stands for a number.
        per_request: modules whose outputs depend on nothing that changes from step to step.
        text: submodules of a block that work on text tokens alone.
        output: shape rule of the transformer's output: like its `tokens` input, or a `latent` with out_channels.
        cfg: how classifier-free guidance is done.
        heads_key, layers_keys: config keys of the number of attention heads, and of blocks in each list.
        defaults: call arguments that make a plain request right.
        tiny: config of a tiny random model for the conformance kit.
    """

    name: str
    transformer: str
    pipelines: tuple[str, ...]
    blocks: tuple[str, ...]
    streams: Mapping[str, Rows]
    returns: tuple[Rows, ...]
    joint: Literal["text_first", "image_first"] | None
    sites: Mapping[str, Rows]
    processors: tuple[str, ...]
    exit: str
    batched: tuple[str, ...]
    static: tuple[str, ...]
    output: Literal["tokens", "latent"]
    cfg: Guidance
    embed: Embed
    per_step: tuple[str, ...]
    per_request: tuple[str, ...]
    text: tuple[str, ...] = ()
    not_empty: tuple[str, ...] = ()
    slices: tuple[Slice, ...] = ()
    heads_key: str = "num_attention_heads"
    layers_keys: tuple[str, ...] = ("num_layers",)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)

    def heads(self, config: Mapping[str, Any]) -> int:
        return int(config[self.heads_key])

    def layers(self, config: Mapping[str, Any]) -> int:
        """Blocks of the model, in all of its lists."""
        return sum(int(config[key]) for key in self.layers_keys)

    def batch(self, call: Mapping[str, Any]) -> int:
        """Images that a pipeline call with these arguments makes."""
        prompts: Any = call.get("prompt") if call.get("prompt") is not None else call.get("prompt_embeds")
        each = call.get("num_images_per_prompt") or call.get("num_videos_per_prompt") or 1
        count = len(prompts) if not isinstance(prompts, str) and hasattr(prompts, "__len__") else 1
        return count * int(each)

    def exchange_bytes(
        self, config: Mapping[str, Any], call: Mapping[str, Any], ring: int, ulysses: int, cfg: int, data: int
    ) -> int | None:
        """Bytes of keys and values that a rank holds at one attention site (two blocks for a ring), in fp32.

        None when the call gives no size. Tokens are counted at 16 pixels a side, the finest of the families.
        """
        height, width = call.get("height"), call.get("width")
        if not height or not width:
            return None
        tokens = (int(height) // 16) * (int(width) // 16) * (1 + (int(call.get("num_frames") or 1) - 1) // 4)
        hidden = self.heads(config) * int(config["attention_head_dim"])
        guided = 2 if self.cfg.style == "batched" and self.cfg.active(call) else 1
        rows = -(-self.batch(call) * guided // (data * (cfg if guided == 2 else 1)))
        blocks = 2 if ring > 1 else 1
        return rows * 2 * 4 * blocks * -(-tokens // ring) * hidden // ulysses


def families() -> dict[str, Family]:
    """All family records by name."""
    return {name: importlib.import_module(f"ditpar.pipelines.{name}").FAMILY for name in RECORDS}


def family_of(transformer: str) -> Family:
    """The record of a transformer class. Raises ModelError for an unknown one, with where to read on."""
    known = families()
    for family in known.values():
        if family.transformer == transformer:
            return family
    raise ModelError(
        f"no family record for transformer class {transformer}; known are "
        f"{', '.join(f.transformer for f in known.values())}. docs/adding-a-family.md shows how to write one"
    )
