"""The contract operators have gradients, and these have none: no kernel computes a second derivative."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

F = TypeVar("F", bound=type[Function])


def first_order(function: F) -> F:
    """A `Function` whose backward refuses to be recorded (RuntimeError): what it gives would look like a constant, and
    a second derivative would be wrong in silence.

    The transforms of `torch.func` and forward mode are refused likewise. Calling it costs half of what calling a
    `Function` does, which looks at every argument for what such a transform leaves behind, and by which name the
    backward goes.
    """
    cls: Any = function
    quick, backward = super(Function, cls).apply, cls.backward
    transformed = torch._C._are_functorch_transforms_active

    def apply(*given: Any) -> Any:
        return refuse() if transformed() else quick(*given)

    def refuse(*_: Any) -> Any:
        raise RuntimeError(
            "the contract operators have one backward pass alone, no rule for torch.func (vmap, grad, vjp, jvp, "
            'jacrev, ...) or forward mode: use torch.autograd, or compute with operators("fast")'
        )

    def run(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():  # within a backward pass: create_graph=True
            raise RuntimeError(
                "create_graph=True asks for the gradient of a gradient, which the contract operators do not have: "
                'leave it out, or compute with operators("fast")'
            )
        return backward(ctx, *grads)

    cls.apply, cls.backward, cls.jvp = staticmethod(apply), staticmethod(run), staticmethod(refuse)
    cls._backward_cls.apply = run
    return function
