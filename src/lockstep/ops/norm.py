"""RMS norm and layer norm under the bit contract. Order of sums: `csrc/norm.cpp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.ops.first_order import first_order
from lockstep.ops.raw import kernel, rounded


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


@first_order
class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        y, rstd = kernel.rms_norm(x, rounded(weight, dtype).contiguous(), eps, offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dy = grads[0].contiguous()
        dx, dw = kernel.rms_norm_backward(dy, x, rounded(weight, dy.dtype).contiguous(), rstd, ctx.offset)
        return dx, rounded(dw, weight.dtype), None, None, None


@first_order
class _LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        added = None if bias is None else rounded(bias, dtype).contiguous()
        y, mean, rstd = kernel.layer_norm(x, rounded(weight, dtype).contiguous(), added, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dy = grads[0].contiguous()
        dx, dw, db = kernel.layer_norm_backward(dy, x, rounded(weight, dy.dtype).contiguous(), mean, rstd)
        return (
            dx,
            rounded(dw, weight.dtype),
            None if ctx.bias_dtype is None else rounded(db, ctx.bias_dtype),
            None,
            None,
        )
