"""Weight gradients put off: a linear operator whose backward queues the product for dW instead of computing it.

So a pipeline's B step computes input gradients only, and its W step runs the queue (arXiv 2401.10241), whatever the
block is made of. The products are the operator's own: the bits are those of an undivided backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.ops import Operators
from lockstep.ops.linear import PackedWeight, input_gradient, linear, weight_gradient

Work = tuple[Tensor, Callable[[], Tensor]]
"""A weight, and what computes its gradient."""


class WeightQueue:
    """The weight gradients that backward passes have put off since `take` was last called."""

    def __init__(self) -> None:
        self._work: list[Work] = []

    def put(self, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        self._work.append((weight, gradient))

    def take(self) -> list[Work]:
        """What was queued, in order; the queue is empty afterwards."""
        found, self._work = self._work, []
        return found


def deferring(ops: Operators, queue: WeightQueue) -> Operators:
    """The operators with a linear layer that puts its weight gradient into the queue."""

    def put_off(x: Tensor, weight: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        if isinstance(weight, PackedWeight) or not weight.requires_grad:
            return ops.linear(x, weight, bias, out_dtype=out_dtype)
        y: Tensor = _Deferred.apply(x, weight, bias, out_dtype, queue, _PRODUCTS[ops.numerics])
        return y

    return replace(ops, linear=put_off)


class _Deferred(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype | None,
        queue: WeightQueue,
        products: tuple[Callable[..., Tensor], ...],
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.weight = weight  # the parameter itself: a tensor that is saved may come back as another object
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.queue, ctx.products = queue, products
        forward, _, _, _ = products
        return forward(x, weight.detach(), bias, out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        _, input_product, weight_product, sums = ctx.products
        dy = grads[0].to(x.dtype).contiguous()
        ctx.queue.put(weight, lambda: weight_product(dy, x).to(weight.dtype))
        dx = input_product(dy, weight) if ctx.needs_input_grad[0] else None
        db = sums(dy).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, None, db, None, None, None


def _fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    from lockstep.ops import plain

    return plain.linear(x, weight, bias, out_dtype)


_PRODUCTS: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "bitwise": (linear, input_gradient, weight_gradient, lambda dy: torch.ops.lockstep.column_sums(dy)),
    "fast": (
        _fast_linear,
        lambda dy, weight: dy @ weight.detach().to(dy.dtype),
        lambda dy, x: dy.T @ x,
        lambda dy: dy.sum(0),
    ),
}
"""(forward, input gradient, weight gradient, bias gradient) of a linear layer in each numerics mode."""
