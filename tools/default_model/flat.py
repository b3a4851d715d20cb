"""All weights of a network as one flat vector, so that masters, averages and gradients are single tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn


def offsets(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Where each parameter begins; one entry more than parameters, the last is the size."""
    found = [0]
    for parameter in parameters:
        found.append(found[-1] + parameter.numel())
    return found


def views(flat: torch.Tensor, parameters: Sequence[nn.Parameter]) -> Iterator[torch.Tensor]:
    """The parts of a flat vector in the parameters' shapes."""
    for parameter, offset in zip(parameters, offsets(parameters), strict=False):
        yield flat[offset : offset + parameter.numel()].view(parameter.shape)


def flatten(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """A copy of the parameters as one vector in fp32."""
    return torch.cat([p.detach().flatten().float() for p in parameters])


def fill(parameters: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
    """Copies a flat vector into the parameters."""
    for parameter, view in zip(parameters, views(flat, parameters), strict=True):
        parameter.data.copy_(view)
