"""Experts that ranks share as operators: what a captured graph has in the place of `SpreadExperts` (see `nodes`).

How many rows come to a rank's experts depends on data, and a program's sizes do not. So one operator sends the rows,
computes and sends the results back, with the sizes of its batch; what it keeps for the backward pass lies beside the
program, with `Group.kept`, and so do the gradients of weights that the backward pass puts off, with `Group.late`. Who
runs the programs takes both, block by block: a block has one layer of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.ops import spread_experts as eager
from lockstep.ops.spread_experts import Devices, SharedExperts
from lockstep.parallel.nodes import Group, define_at_once

RAW = torch.ops.lockstep_mesh


class ExpertNodes(SharedExperts):
    """`Operators.experts` of a graph that is being captured, for the place of a rank among others."""

    def __init__(self, axis: str, devices: Devices) -> None:
        self.axis, self.devices = axis, devices

    def products(self, rows: Tensor, offsets: Tensor, code: int, weights: Sequence[Tensor]) -> Tensor:
        y: Tensor = _Node.apply(rows, offsets, code, self.axis, *weights)
        return y


class _Node(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, offsets: Tensor, code: int, axis: str, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        ctx.code, ctx.axis = code, axis
        y: Tensor = RAW.spread_experts(rows, offsets, [w.detach() for w in weights], code, axis)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weights, trained = [w.detach() for w in ctx.saved_tensors], any(ctx.needs_input_grad[4:])
        dx: Tensor = RAW.spread_experts_backward(grads[0], weights, ctx.code, trained, ctx.axis)
        return dx, None, None, None, *[None] * len(weights)


def _forward(group: Group, out: Tensor, rows: Tensor, offsets: Tensor, weights: list[Tensor], code: int) -> None:
    _, group.kept = eager.forward(rows, offsets, weights, code, group.axis, out)


def _backward(group: Group, out: Tensor, dy: Tensor, weights: list[Tensor], code: int, trained: bool) -> None:
    kept, group.kept = group.kept, None
    assert kept is not None, "the backward pass of experts runs without what their forward pass kept"
    _, late = eager.backward(dy, kept, weights, code, group.axis, out)
    group.late = late if trained else []


def _like(rows: Tensor, *rest: Any) -> Tensor:
    return rows.new_empty(rows.shape)


define_at_once("spread_experts", "Tensor rows, Tensor offsets, Tensor[] weights, int code", _like, _forward)
define_at_once("spread_experts_backward", "Tensor dy, Tensor[] weights, int code, bool trained", _like, _backward)
