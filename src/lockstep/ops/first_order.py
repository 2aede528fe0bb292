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

    Calling it costs half of what calling a `Function` does, which looks at every argument for what the transforms of
    `torch.func` leave behind, and by which name the backward goes; that is left to it where such a transform is active.
    """
    cls: Any = function
    plain, quick, backward = cls.apply, super(Function, cls).apply, cls.backward
    transformed = torch._C._are_functorch_transforms_active

    def apply(*given: Any) -> Any:
        return plain(*given) if transformed() else quick(*given)

    def run(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():  # within a backward pass: create_graph=True
            raise RuntimeError(
                "create_graph=True asks for the gradient of a gradient, which the contract operators do not have: "
                'leave it out, or compute with operators("fast")'
            )
        return backward(ctx, *grads)

    cls.apply, cls.backward = staticmethod(apply), staticmethod(run)
    cls._backward_cls.apply = run
    return function
