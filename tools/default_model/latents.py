"""Stage 3: which pictures the transformer learns, and their latents at 256 and 128 pixels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL

from default_model import pictures, tokens

_OBJECTS = Path(__file__).with_name("objects.txt")
_SKIPPED = re.compile(
    r"with-flowers|empty-nest|guide-dog|service-dog|bouquet|rosette|hatching|ewe$|^ram$|^ox$|spouting|two-hump"
    r"|cooked-rice|curry|fish-cake|pot-of|shallow-pan|stuffed|falafel|tamale|oden|mate$|teacup-without|clinking"
    r"|grinning-cat|smiling-cat|leafy|herb|sheaf|fallen|white-flower|wilted|microbe|wing$|roasted|rice-cracker|canned"
    r"|butter$|salt$|flatbread|ginger|beans|jar$|tumbler|fork|spoon|chopsticks|bottle-with|lotus|hyacinth|wood$|rock$"
    r"|bison|boar$|badger|blackbird"
)
_SPELLING = {"piata": "pinata"}


def encode(work: Path) -> None:
    """Writes `latents.pt`, `vae/` with the latents' whitening folded in, and the tokenizers."""
    found, facts = pictures.load(work)
    chosen = _chosen(facts)
    captions = [_SPELLING.get(name, name).replace("-", " ") for name in (facts["names"][i] for i in chosen)]
    vae = AutoencoderKL.from_pretrained(work / "vae_raw").eval()
    x = pictures.to_tensor(found[chosen])
    with torch.no_grad():
        _whiten(vae, _means(vae, x))
        large, small = _means(vae, x), _means(vae, F.interpolate(x, size=128, mode="area"))
    vae.save_pretrained(work / "vae")
    torch.save({"large": large, "small": small, "captions": captions, "pictures": chosen}, work / "latents.pt")
    tokens.make(work, captions, facts["names"])
    print(f"{len(captions)} captions, latents' standard deviation {large.std():.3f} and {small.std():.3f}")


def _chosen(facts: dict[str, Any]) -> list[int]:
    """Distinct, nameable things: all kept animals and food, and the objects of the list."""
    objects, subset = set(_OBJECTS.read_text().split()), set(facts["subset"])
    living = ("Animals & Nature", "Food & Drink")
    return [
        i
        for i, (name, kind) in enumerate(zip(facts["names"], facts["categories"], strict=True))
        if name in objects or (i in subset and kind in living and not _SKIPPED.search(name))
    ]


def _means(vae: AutoencoderKL, x: torch.Tensor) -> torch.Tensor:
    """[n, 3, side, side] to [n, channels, side / 8, side / 8]."""
    return torch.cat([vae.encode(part).latent_dist.mean for part in x.split(16)])


def _whiten(vae: AutoencoderKL, z: torch.Tensor) -> None:
    """Folds mean and deviation per channel into the 1 x 1 convolutions, so that the scaling factor is 1."""
    mean, deviation = z.mean((0, 2, 3)), z.std((0, 2, 3))
    channels = len(mean)
    before, after = vae.quant_conv, vae.post_quant_conv
    before.weight[:channels] /= deviation.view(-1, 1, 1, 1)
    before.bias[:channels] = (before.bias[:channels] - mean) / deviation
    before.bias[channels:] -= 2 * deviation.log()
    after.bias += (after.weight[:, :, 0, 0] * mean).sum(1)
    after.weight *= deviation.view(1, -1, 1, 1)
    vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)
