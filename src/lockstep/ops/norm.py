"""RMS norm and layer norm under the bit contract. Order of sums: `csrc/norm.cpp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.ops.first_order import first_order


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x [..., D] / sqrt(mean(x^2) + eps) * (weight [D] + offset), rounded once (arXiv 1910.07467).

    out_dtype: that of the result and of the rounded weight, by default x's; x may be float32 for a bfloat16 result.
    """
    y: Tensor = _RMSNorm.apply(x, weight, eps, offset, out_dtype or x.dtype)
    return y


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None = None
) -> Tensor:
    """(x [..., D] - mean) / sqrt(variance + eps) * weight [D] + bias [D], rounded once (arXiv 1607.06450).

    out_dtype: that of the result and of the rounded weight and bias, by default x's; x may be float32 for a bfloat16
    result.
    """
    y: Tensor = _LayerNorm.apply(x, weight, bias, eps, out_dtype or x.dtype)
    return y


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        y, rstd = torch.ops.lockstep.rms_norm(x, weight.to(dtype).contiguous(), eps, offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dy = grads[0].contiguous()
        dx, dw = torch.ops.lockstep.rms_norm_backward(dy, x, weight.to(dy.dtype).contiguous(), rstd, ctx.offset)
        return dx, dw.to(weight.dtype), None, None, None


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        rounded = None if bias is None else bias.to(dtype).contiguous()
        y, mean, rstd = torch.ops.lockstep.layer_norm(x, weight.to(dtype).contiguous(), rounded, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dy = grads[0].contiguous()
        dx, dw, db = torch.ops.lockstep.layer_norm_backward(dy, x, weight.to(dy.dtype).contiguous(), mean, rstd)
        return dx, dw.to(weight.dtype), None if ctx.bias_dtype is None else db.to(ctx.bias_dtype), None, None
