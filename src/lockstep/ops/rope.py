"""Rotary position embedding under the bit contract: products and one sum per element, nothing to order."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from lockstep.ops.first_order import first_order
from lockstep.ops.linear import refuse_gradient
from lockstep.ops.raw import kernel


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Turn x [T, H, d] by its positions int32 [T]: pairs (j, j + d / 2), table float32 [P, d / 2, 2] of cos, sin
    (arXiv 2104.09864 in the half-split form of Llama). The table has no gradient (RuntimeError)."""
    refuse_gradient("a rotary table", table)
    y: Tensor = _Rope.apply(x, positions, table)
    return y


@first_order
class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(positions, table)
        return kernel.rope(x.contiguous(), positions, table, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        positions, table = ctx.saved_tensors
        return kernel.rope(grads[0].contiguous(), positions, table, -1.0), None, None
