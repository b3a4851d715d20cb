"""GroupNorm with a hand-written backward: torch's own took 48 % of the time of the VAE's training in bf16 on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class GroupNormFunction(torch.autograd.Function):
    """`F.group_norm` for channels-last input [batch, channels, height, width]."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float
    ) -> torch.Tensor:
        n, c, h, w = x.shape
        y, mean, rstd = torch.native_group_norm(x, weight, bias, n, c, h * w, groups, eps)
        mean, rstd = (t.float().repeat_interleave(c // groups, 1) for t in (mean, rstd))
        context.save_for_backward(x, weight, mean, rstd)
        context.groups = groups
        return y

    @staticmethod
    def backward(context: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, mean, rstd = context.saved_tensors
        n, c, h, w = x.shape
        each = c // context.groups
        rows = dy.permute(0, 2, 3, 1).reshape(n, h * w, c).float()
        inputs = x.permute(0, 2, 3, 1).reshape(n, h * w, c).float()
        sum_dy = rows.sum(1)
        sum_dy_xhat = ((rows * inputs).sum(1) - mean * sum_dy) * rstd

        def group_mean(t: torch.Tensor) -> torch.Tensor:
            return t.view(n, context.groups, each).sum(-1).repeat_interleave(each, 1) / (h * w * each)

        # dx = rstd (weight dy - m1 - xhat m2), with the means over a group of weight dy and of weight dy xhat
        m1, m2 = group_mean(sum_dy * weight.float()), group_mean(sum_dy_xhat * weight.float())
        dx = (rstd * (mean * rstd * m2 - m1)).unsqueeze(1) + rows * (rstd * weight.float()).unsqueeze(1)
        dx.addcmul_(inputs, (-rstd * rstd * m2).unsqueeze(1))
        dx = dx.to(x.dtype).view(n, h, w, c).permute(0, 3, 1, 2)
        return dx, sum_dy_xhat.sum(0).to(weight.dtype), sum_dy.sum(0).to(weight.dtype), None, None


def use_fast(model: nn.Module) -> None:
    """Gives each GroupNorm instance of the model the fast forward."""
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            module.forward = lambda x, m=module: GroupNormFunction.apply(x, m.weight, m.bias, m.num_groups, m.eps)


def use_stock(model: nn.Module) -> None:
    """Undoes `use_fast`."""
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            del module.forward
