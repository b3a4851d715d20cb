"""Muon: momentum steps made orthogonal, for the matrices of a network.

Source: Keller Jordan et al., 2024, kellerjordan.github.io/posts/muon.
"""

from __future__ import annotations

import torch

MOMENTUM = 0.95


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """[n, rows, columns], rows <= columns: singular values moved close to 1 by five Newton-Schulz steps in bf16."""
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x.float()


class Muon:
    """Steps for the matrices that lie in one flat vector of weights.

    Args:
        matrices: offset in the flat vector and shape [rows, columns] of each.
    """

    def __init__(self, size: int, matrices: list[tuple[int, tuple[int, int]]]) -> None:
        self.momentum = torch.zeros(size)
        self.groups: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]] = {}
        for offset, shape in matrices:
            self.groups.setdefault((min(shape), max(shape)), []).append((offset, shape))

    def step(self, weights: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
        """Moves the matrices in `weights`, [size], along Nesterov momentum. Other entries stay as they are."""
        self.momentum.mul_(MOMENTUM).add_(gradient)
        ahead = gradient.add(self.momentum, alpha=MOMENTUM)
        for (low, high), members in self.groups.items():
            stack = torch.stack([_wide(ahead[o : o + low * high].view(shape)) for o, shape in members])
            for (offset, shape), move in zip(members, orthogonalised(stack), strict=True):
                matrix = weights[offset : offset + low * high].view(shape)
                matrix.add_(move if shape[0] <= shape[1] else move.mT, alpha=-rate * 0.2 * high**0.5)


def _wide(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
