"""Operators on rows: `csrc/rows.cpp`. activation 0: silu, 1: gelu (tanh form)."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.ops.raw.define import define, same


@define("rope(Tensor x, Tensor positions, Tensor table, float sign) -> Tensor")
def rope(x: Tensor, positions: Tensor, table: Tensor, sign: float) -> Tensor:
    """x [T, heads, d], positions int32 [T], table float32 [P, d / 2, 2]; sign -1 turns back (the gradient)."""
    same("table", tuple(table.shape[1:]), (x.shape[2] // 2, 2))
    return torch.empty_like(x)


@define("activation(Tensor x, int activation) -> Tensor")
def activation(x: Tensor, activation: int) -> Tensor:
    """activation(x)."""
    return torch.empty_like(x)


@define("activation_backward(Tensor dy, Tensor x, int activation) -> Tensor")
def activation_backward(dy: Tensor, x: Tensor, activation: int) -> Tensor:
    """dx."""
    same("dy", tuple(dy.shape), tuple(x.shape))
    return torch.empty_like(x)


@define("gated(Tensor gate, Tensor up, int activation) -> Tensor")
def gated(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """activation(gate) * up."""
    same("up", tuple(up.shape), tuple(gate.shape))
    return torch.empty_like(gate)


@define("gated_backward(Tensor dy, Tensor gate, Tensor up, int activation) -> (Tensor, Tensor)")
def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: int) -> tuple[Tensor, Tensor]:
    """d_gate, d_up."""
    same("dy", tuple(dy.shape), tuple(gate.shape))
    return torch.empty_like(gate), torch.empty_like(up)


@define("share_heads(Tensor x, int heads) -> Tensor")
def share_heads(x: Tensor, heads: int) -> Tensor:
    """x [T, d] -> [T, heads, d], a copy for every head."""
    return x.new_empty(x.shape[0], heads, x.shape[1])


@define("share_heads_backward(Tensor dy) -> Tensor")
def share_heads_backward(dy: Tensor) -> Tensor:
    """dy [T, heads, d] -> [T, d], the sums over the heads, ascending."""
    return dy.new_empty(dy.shape[0], dy.shape[2])
