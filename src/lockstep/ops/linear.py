"""Linear layers under the bit contract, and their two gradients as separately callable products.

Order of sums: `csrc/gemm.cpp`. A weight is laid out in panels of sixteen columns before a product; inference keeps
the panels (`pack`), training makes them per call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.errors import LockstepError
from lockstep.ops.device_class import AMX_CLASS, BF16_CLASS, device_class
from lockstep.ops.first_order import first_order
from lockstep.ops.huge_pages import HugePages
from lockstep.ops.raw import kernel, rounded
from lockstep.ops.raw.linear import panels as panels_of


@dataclass(frozen=True)
class PackedWeight:
    """A weight [n, K] laid out for products: panels [ceil(n / 16), K, 16] in the compute dtype; what lies where within
    one is the device class's (`csrc/steps.h`)."""

    panels: Tensor
    n: int


def pack(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
    """Lay out a weight [N, K] (float32 or bfloat16, rounded to dtype) for `linear` without gradient."""
    return lay_out(weight.detach(), dtype)


def lay_out(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
    """`pack` where nothing records a gradient anyway, as within an `autograd.Function`."""
    return PackedWeight(kernel.pack_columns(weight.contiguous(), dtype), weight.shape[0])


_KEPT = HugePages()
"""An allocator, as `malloc` is one for the process: it knows of no model."""


def pack_to_keep(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
    """`pack` for a weight that many steps will read: into large memory pages."""
    if weight.device.type != "cpu" or type(weight.detach()) is not Tensor:  # a fake tensor has no memory to choose
        return pack(weight, dtype)
    panels = _KEPT.empty((panels_of(weight.shape[0]), weight.shape[1], 16), dtype)
    torch.ops.lockstep.pack_columns.out(weight.detach().contiguous(), dtype, out=panels)
    return PackedWeight(panels, weight.shape[0])


def linear(
    x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]; [T, N] in out_dtype (default: that of x).

    A packed weight has no gradient: RuntimeError where one would be asked for.
    """
    if isinstance(weight, PackedWeight):
        refuse_gradient("a product with a packed weight", x)
        return _product(x, weight, bias, out_dtype)
    return _Linear.apply(x, weight, bias, out_dtype)


def input_gradient(dy: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """dx [T, K] = dy [T, N] times weight [N, K]: a chain over ascending n; in dy's dtype unless another is given.
    Called where nothing records a gradient, in a backward pass."""
    panels = kernel.pack_rows(weight.contiguous(), dy.dtype)
    return kernel.gemm(dy, panels, weight.shape[1], None, out_dtype or dy.dtype)


def weight_gradient(dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """dW float32 [N, K] = dy [T, N] transposed times x [T, K]: a chain over ascending rows, going on from `out`: of a
    number of rows that `rows_together` divides, to have the bits of one run."""
    panels = kernel.pack_rows(x, x.dtype)
    if out is None:
        return kernel.gemm_transposed(dy, panels, x.shape[1])
    kernel.gemm_transposed_add(dy, panels, out)
    return out


def rows_together(dtype: torch.dtype) -> int:
    """Rows that a weight gradient's chain takes in one step: of bfloat16 2 or 32 in the device classes that multiply
    them by pairs or by tiles (`csrc/pairs16.h`, `csrc/tiles.h`)."""
    return {BF16_CLASS: 2, AMX_CLASS: 32}.get(device_class(), 1) if dtype == torch.bfloat16 else 1


def expect_alike(what: str, weights: Sequence[Tensor | PackedWeight]) -> None:
    """LockstepError where weights that one product reads are packed in part, or of several heights: panels of sixteen
    columns can be as many for both."""
    packed = [isinstance(weight, PackedWeight) for weight in weights]
    if any(packed) and not all(packed):
        raise LockstepError(f"{what} was given packed and plain weights together: pack all of them, or none.")
    heights = {weight.n if isinstance(weight, PackedWeight) else weight.shape[0] for weight in weights}
    if len(heights) > 1:
        raise LockstepError(
            f"{what} was given weights of {' and '.join(map(str, sorted(heights)))} rows: expected one height for all."
        )


def refuse_gradient(what: str, x: Tensor) -> None:
    """Raise where autograd would go through an operator without gradient, and end there in silence."""
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{what} has no gradient: detach its input or call it under torch.no_grad()")


def _product(x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    bias = None if bias is None else bias.detach().to(x.dtype).contiguous()
    return kernel.gemm(x.contiguous(), packed.panels, packed.n, bias, out_dtype or x.dtype)


@first_order
class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        x, dtype = x.contiguous(), x.dtype
        ctx.save_for_backward(x, weight)
        if bias is not None:
            ctx.bias_dtype = bias.dtype
            bias = rounded(bias.detach(), dtype).contiguous()
        panels = kernel.pack_columns(weight.contiguous(), dtype)
        return kernel.gemm(x, panels, weight.shape[0], bias, out_dtype or dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = rounded(grads[0], x.dtype).contiguous()
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        dx = input_gradient(dy, weight) if need_x else None
        dw = rounded(weight_gradient(dy, x), weight.dtype) if need_weight else None
        db = rounded(kernel.column_sums(dy), ctx.bias_dtype) if need_bias else None
        return dx, dw, db, None
