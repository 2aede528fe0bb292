"""RMS norm under the bit contract. Order of sums: `csrc/rows.cpp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [..., D] / sqrt(mean(x^2) + eps) * (weight [D] + offset), rounded once (arXiv 1910.07467)."""
    y: Tensor = _RMSNorm.apply(x, weight, eps, offset)
    return y


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        x = x.contiguous()
        y, rstd = torch.ops.lockstep.rms_norm(x, weight.detach().to(x.dtype), eps, offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        rounded = weight.detach().to(x.dtype)
        dx, dw = torch.ops.lockstep.rms_norm_backward(grads[0].contiguous(), x, rounded, rstd, ctx.offset)
        return dx, dw.to(weight.dtype), None, None
