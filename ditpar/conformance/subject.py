"""The subject of the proofs: a record, a tiny stock pipeline, and the transformer calls that the pipeline made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ditpar.conformance.probe import hooks
from ditpar.conformance.report import FalseClaim
from ditpar.conformance.variants import Variant
from ditpar.family import Family

TOLERANCE = 1e-5
"""Relative L2 up to which two fp32 results count as equal: the float re-ordering floor, with room."""
VISIBLE = 1e-3
"""Relative L2 from which a change counts as one."""


def distance(got: Tensor, want: Tensor) -> float:
    """Relative L2 in fp64; infinite for unequal shapes."""
    if got.shape != want.shape:
        return math.inf
    return float((got.double() - want.double()).norm() / want.double().norm())


@dataclass(frozen=True)
class Call:
    """One transformer call as the pipeline made it, all arguments by name."""

    name: str
    transformer: Any
    arguments: Mapping[str, Any]

    @property
    def batch(self) -> int:
        return int(self.arguments["hidden_states"].shape[0])

    @property
    def text_tokens(self) -> int:
        return int(self.arguments["encoder_hidden_states"].shape[1])

    @property
    def image_tokens(self) -> int:
        """Counted from the input alone: its token dim, or its latent's size over the patch size."""
        hidden = self.arguments["hidden_states"]
        if hidden.ndim == 3:
            return int(hidden.shape[1])
        sides = hidden.shape[2:]
        patch = self.transformer.config.patch_size
        patches = patch if isinstance(patch, tuple | list) else (1,) * (len(sides) - 2) + (patch,) * 2
        return math.prod(side // p for side, p in zip(sides, patches, strict=True))

    @torch.no_grad()
    def run(self, **changes: Any) -> Tensor:
        """The transformer's output for these arguments."""
        arguments = {**self.arguments, **changes}
        arguments = {k: dict(v) if isinstance(v, dict) else v for k, v in arguments.items()}  # stock code may pop
        return self.transformer(**arguments, return_dict=False)[0]


@dataclass
class Subject:
    """A record under test on one variant of its family.

    Attributes:
        calls: each transformer's calls in its first step (both branches of separate guidance), one prompt.
    """

    family: Family
    variant: Variant
    pipe: Any
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, family: Family, variant: Variant, pipe: Any = None) -> Subject:
        """Builds the variant's pipeline, unless `pipe` is given, and records its calls."""
        subject = cls(family, variant, variant.build(family) if pipe is None else pipe)
        first: dict[str, Tensor] = {}
        for call in subject.record():
            time = call.arguments["timestep"]
            if torch.equal(first.setdefault(call.name, time), time):
                subject.calls.append(call)
        return subject

    def record(self, **options: Any) -> list[Call]:
        """The transformer calls that a pipeline call makes, in order."""
        return record(self.pipe, self.variant.inputs(self.family, self.pipe, **options))

    def blocks(self, transformer: nn.Module) -> dict[str, nn.Module]:
        """The blocks by path, in the record's order. Raises FalseClaim for a list that does not exist."""
        found: dict[str, nn.Module] = {}
        for name in self.family.blocks:
            for index, block in enumerate(submodule(transformer, name).children()):
                found[f"{name}.{index}"] = block
        return found

    def sites(self, block: nn.Module) -> dict[str, nn.Module]:
        """The block's attention sites by name; a site that this block lacks is left out."""
        found = {name: getattr(block, name, None) for name in self.family.sites}
        return {name: module for name, module in found.items() if isinstance(module, nn.Module)}

    def rows(self, call: Call, kind: str) -> int:
        """Tokens of a kind (`image`, `text`, `joint`)."""
        counts = {"image": call.image_tokens, "text": call.text_tokens}
        return counts[kind] if kind in counts else sum(counts.values())


def submodule(transformer: nn.Module, path: str) -> nn.Module:
    """Raises FalseClaim for a path that does not exist."""
    try:
        return transformer.get_submodule(path)
    except AttributeError:
        raise FalseClaim(f"{type(transformer).__name__} has no module {path}") from None


def record(pipe: Any, inputs: Mapping[str, Any]) -> list[Call]:
    """The transformer calls of `pipe(**inputs)`, in order."""
    calls: list[Call] = []
    with hooks() as add:
        for name in ("transformer", "transformer_2"):
            transformer = getattr(pipe, name, None)
            if transformer is None:
                continue

            def note(arguments: dict[str, Any], name: str = name, transformer: nn.Module = transformer) -> None:
                arguments = {k: v for k, v in arguments.items() if k != "return_dict" and v is not None}
                calls.append(Call(name, transformer, arguments))

            add.before(transformer, note)
        pipe(**inputs)
    return calls
