"""The contract operators have gradients, and these have none: no kernel computes a second derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]
Backward = Callable[..., Gradients]


def first_order(backward: Backward) -> Backward:
    """A `Function.backward` that refuses to be recorded (RuntimeError): what it gives would look like a constant, and a
    second derivative would be wrong in silence."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Gradients:
        if torch.is_grad_enabled():  # within a backward pass: create_graph=True
            raise RuntimeError(
                "create_graph=True asks for the gradient of a gradient, which the contract operators do not have: "
                'leave it out, or compute with operators("fast")'
            )
        return backward(ctx, *grads)

    return run
