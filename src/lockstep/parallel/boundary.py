"""A point of the graph that tells when the backward pass goes through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function


def passed(x: Tensor, backward: Callable[[], None]) -> Tensor:
    """x; `backward` is called when the gradient of x is there, so when all that came after x in the forward, and the
    gradients of the parameters that were used there, are done."""
    y: Tensor = _Passed.apply(x, backward)
    return y


class _Passed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Callable[[], None]) -> Tensor:
        ctx.act = backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.act()
        return grads[0], None
