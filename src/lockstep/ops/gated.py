"""Activations, alone and gated (SwiGLU, GeGLU; arXiv 2002.05202), under the bit contract: elementwise, one rounding."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from lockstep.errors import LockstepError
from lockstep.ops.first_order import first_order
from lockstep.ops.raw import kernel

_CODES = {"silu": 0, "gelu_tanh": 1}
"""The activations by the kernels' numbers."""


def code_of(activation: str) -> int:
    """An activation's number for the kernels; LockstepError for one that they do not have."""
    if activation not in _CODES:
        raise LockstepError(f"activation is {activation!r}: the kernels have {' and '.join(_CODES)}.")
    return _CODES[activation]


def activation(x: Tensor, name: str) -> Tensor:
    """The activation of x (any shape): "silu" or "gelu_tanh"."""
    y: Tensor = _Activation.apply(x, code_of(name))
    return y


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate [T, F]) * up [T, F]; activation "silu" or "gelu_tanh"."""
    y: Tensor = _Gated.apply(gate, up, code_of(activation))
    return y


@first_order
class _Activation(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, code: int) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.code = code
        return kernel.activation(x, code)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return kernel.activation_backward(grads[0].contiguous(), x, ctx.code), None


@first_order
class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, code: int) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.code = code
        return kernel.gated(gate, up, code)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = kernel.gated_backward(grads[0].contiguous(), gate, up, ctx.code)
        return d_gate, d_up, None
