"""Norms over the last dimension: `csrc/norm.cpp`. x may be float32 where the weight is bfloat16.

`add_` forms take the residual sum too: x float32 + h, rounded to float32, then the norm of that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.ops.raw.define import define, same


def _row_values(x: Tensor) -> Tensor:
    return x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


def _column_values(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[-1], dtype=torch.float32)


@define("rms_norm(Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)")
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """x [..., d], weight [d] -> the normed x in the weight's dtype, 1 / rms float32 [rows]."""
    same("weight", tuple(weight.shape), (x.shape[-1],))
    return x.new_empty(x.shape, dtype=weight.dtype), _row_values(x)


@define("rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, float offset) -> (Tensor, Tensor)")
def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    """dx [..., d] in x's dtype, d_weight float32 [d]."""
    same("dy", tuple(dy.shape), tuple(x.shape))
    return torch.empty_like(x), _column_values(x)


@define("rms_norm_weight_gradient(Tensor dy, Tensor x, Tensor rstd, Tensor before) -> Tensor")
def rms_norm_weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor, before: Tensor) -> Tensor:
    """d_weight float32 [d] of these rows and the ones before them, whose d_weight is `before`."""
    same("dy", tuple(dy.shape), tuple(x.shape))
    same("before", tuple(before.shape), (x.shape[-1],))
    return _column_values(x)


@define("add_rms_norm(Tensor x, Tensor h, Tensor weight, float eps, float offset) -> (Tensor, Tensor, Tensor)")
def add_rms_norm(x: Tensor, h: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor, Tensor]:
    """x float32 [..., d], h [..., d] in the weight's dtype -> x + h float32, its norm, 1 / rms."""
    same("h", (tuple(h.shape), h.dtype), (tuple(x.shape), weight.dtype))
    return torch.empty_like(x), torch.empty_like(h), _row_values(x)


@define(
    "add_rms_norm_backward(Tensor dy, Tensor d_sum, Tensor sum, Tensor weight, Tensor rstd, float offset) "
    "-> (Tensor, Tensor, Tensor)"
)
def add_rms_norm_backward(
    dy: Tensor, d_sum: Tensor, sum: Tensor, weight: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dx float32 = d_sum (what the sum's other readers give) + the norm's gradient, dh = dx in dy's dtype, d_weight."""
    same("d_sum", tuple(d_sum.shape), tuple(sum.shape))
    return torch.empty_like(sum), torch.empty_like(dy), _column_values(sum)


@define("layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., d], weight and bias [d] -> the normed x in the weight's dtype, mean and 1 / deviation float32 [rows]."""
    same("weight", tuple(weight.shape), (x.shape[-1],))
    return x.new_empty(x.shape, dtype=weight.dtype), _row_values(x), _row_values(x)


@define("layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd) -> (Tensor, Tensor, Tensor)")
def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx [..., d] in x's dtype, d_weight and d_bias float32 [d]."""
    same("dy", tuple(dy.shape), tuple(x.shape))
    return torch.empty_like(x), _column_values(x), _column_values(x)


@define(
    "add_layer_norm(Tensor x, Tensor h, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor, Tensor)"
)
def add_layer_norm(
    x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x + h float32, its norm, mean, 1 / deviation."""
    same("h", (tuple(h.shape), h.dtype), (tuple(x.shape), weight.dtype))
    return torch.empty_like(x), torch.empty_like(h), _row_values(x), _row_values(x)


@define(
    "add_layer_norm_backward(Tensor dy, Tensor d_sum, Tensor sum, Tensor weight, Tensor mean, Tensor rstd) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
def add_layer_norm_backward(
    dy: Tensor, d_sum: Tensor, sum: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx float32, dh in dy's dtype, d_weight, d_bias."""
    same("d_sum", tuple(d_sum.shape), tuple(sum.shape))
    return torch.empty_like(sum), torch.empty_like(dy), _column_values(sum), _column_values(sum)
