"""Operators on rows: `csrc/rows.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.ops.raw.define import define, same


@define("rms_norm(Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)")
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """x [..., d], weight [d] -> the normed x in the weight's dtype, 1 / rms float32 [rows]."""
    same("weight", tuple(weight.shape), (x.shape[-1],))
    rstd = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    return x.new_empty(x.shape, dtype=weight.dtype), rstd


@define("rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, float offset) -> (Tensor, Tensor)")
def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    """dx [..., d] in x's dtype, d_weight float32 [d]."""
    same("dy", tuple(dy.shape), tuple(x.shape))
    return torch.empty_like(x), x.new_empty(x.shape[-1], dtype=torch.float32)


@define("rope(Tensor x, Tensor positions, Tensor table, float sign) -> Tensor")
def rope(x: Tensor, positions: Tensor, table: Tensor, sign: float) -> Tensor:
    """x [T, heads, d], positions int32 [T], table float32 [P, d / 2, 2]; sign -1 turns back (the gradient)."""
    same("table", tuple(table.shape[1:]), (x.shape[2] // 2, 2))
    return torch.empty_like(x)


@define("gated(Tensor gate, Tensor up, int activation) -> Tensor")
def gated(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """activation(gate) * up; activation 0: silu, 1: gelu (tanh form)."""
    same("up", tuple(up.shape), tuple(gate.shape))
    return torch.empty_like(gate)


@define("gated_backward(Tensor dy, Tensor gate, Tensor up, int activation) -> (Tensor, Tensor)")
def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: int) -> tuple[Tensor, Tensor]:
    """d_gate, d_up."""
    same("dy", tuple(dy.shape), tuple(gate.shape))
    return torch.empty_like(gate), torch.empty_like(up)
