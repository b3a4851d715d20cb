"""What the transformer sees: latents, prompts of several wordings, noise levels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from default_model import network, tokens

WORDINGS = ["{}"] * 8 + ["a {}", "emoji of a {}"]
DROPPED = 0.1
"""Share of empty prompts, for classifier-free guidance."""


@dataclass(frozen=True)
class Phase:
    """One part of the training.

    Attributes:
        latents: key in `latents.pt`.
        batch: pictures a step and process.
        side: tokens a side.
        scale: of their positions.
        shift: of the noise levels' logit; higher means noisier.
    """

    latents: str
    batch: int
    side: int
    scale: int
    shift: float


PHASES = (Phase("small", 32, 8, 2, 0.7), Phase("large", 8, 16, 1, 0.4))
"""First the layout at 128 pixels, four times cheaper, then 256 pixels."""


@dataclass
class Batch:
    """`clean`, `noise` [batch, tokens, 32]; `sigmas` [batch]; prompt tokens [batch, 16] for CLIP and T5."""

    clean: torch.Tensor
    noise: torch.Tensor
    sigmas: torch.Tensor
    clip: torch.Tensor
    t5: torch.Tensor


class Batches:
    """Random batches. Every picture is seen once before any is seen again.

    Args:
        only: captions to restrict the pictures to; None for all.
    """

    def __init__(self, work: Path, seed: int, only: set[str] | None = None) -> None:
        found = torch.load(work / "latents.pt")
        rows = [i for i, caption in enumerate(found["captions"]) if only is None or caption in only]
        self.captions = [found["captions"][i] for i in rows]
        self.latents = {phase.latents: network.pack(found[phase.latents][rows]) for phase in PHASES}
        self.prompts = [[self._tokens(t, w) for w in WORDINGS] for t in tokens.load(work)]
        self.empty = [_padded(t, [""])[0] for t in tokens.load(work)]
        self.random = torch.Generator().manual_seed(seed)
        self.order: list[int] = []

    def _tokens(self, tokenizer: tokens.CLIPTokenizer | tokens.T5Tokenizer, wording: str) -> torch.Tensor:
        return _padded(tokenizer, [wording.format(caption) for caption in self.captions])

    def next(self, phase: Phase) -> Batch:
        """A batch for this phase."""
        n, g = phase.batch, self.random
        while len(self.order) < n:
            self.order += torch.randperm(len(self.captions), generator=g).tolist()
        rows, self.order = self.order[:n], self.order[n:]
        clean = self.latents[phase.latents][rows]
        wording = torch.randint(len(WORDINGS), (n,), generator=g).tolist()
        clip, t5 = (torch.stack([kind[w][i] for w, i in zip(wording, rows, strict=True)]) for kind in self.prompts)
        dropped = torch.rand(n, generator=g) < DROPPED
        clip[dropped], t5[dropped] = self.empty
        # Logit-normal noise levels, one from each n-th of the distribution.
        levels = (torch.randperm(n, generator=g) + torch.rand(n, generator=g)) / n
        sigmas = torch.sigmoid(phase.shift + 1.15 * torch.special.ndtri(levels.clamp(1e-4, 1 - 1e-4)))
        return Batch(clean, torch.randn(clean.shape, generator=g), sigmas, clip, t5)


def _padded(tokenizer: tokens.CLIPTokenizer | tokens.T5Tokenizer, texts: list[str]) -> torch.Tensor:
    found = tokenizer(texts, padding="max_length", max_length=tokens.LENGTH, truncation=True, return_tensors="pt")
    return found.input_ids
