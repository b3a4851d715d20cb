"""Random weights under which every path of a model matters."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Fills all parameters from `seed`, so that outputs are of order one and no path is switched off.

    Freshly built diffusion transformers have zero gates, zero output projections and unit norms, under which an error
    in a block or in a norm's weight would not show. The filling is by shape alone: it depends on neither the default
    generator nor the model's own initialisation, and leaves buffers (position tables) as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "scale_shift_table" in name:
            value = 0.5 * noise
        elif parameter.ndim > 1:
            fan_in = parameter.numel() / parameter.shape[0]
            value = noise / fan_in**0.5
        elif name.endswith("weight"):
            value = 1 + 0.2 * noise
        else:
            value = 0.2 * noise
        parameter.copy_(value)
