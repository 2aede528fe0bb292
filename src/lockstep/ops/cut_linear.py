"""Linear layers as a tensor-parallel layout cuts them, in a fixed number of segments (contract C4).

With ``canonical_tp = N`` a weight that is cut by *rows* (of the input's width K) is multiplied as N products over fixed
segments of K, each in float32, added by a binary tree and rounded once; the input's gradient of a weight cut by
*columns* (of the output's width) likewise over segments of the output. A device holds some of the segments, adds
theirs up, and `add` does the upper part of the tree across devices: on one device nothing. So every degree that
divides N gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.ops import linear as contract
from lockstep.ops import plain
from lockstep.ops.first_order import first_order
from lockstep.ops.linear import refuse_gradient
from lockstep.ops.operators import CutProduct, Operators, Split
from lockstep.ops.raw import kernel
from lockstep.ops.row_shards import Rows, SharedRows, Whole, on_rows
from lockstep.ops.tree import contiguous_parts, neighbour_sum

Add = Callable[[Tensor, torch.dtype], Tensor]
"""float32 -> the sum of all devices' tensors by the tree over them, rounded once to dtype; the same bits on each"""


WeightGradient = Callable[..., Tensor]
"""() -> a weight's gradient; where rows are shared, (that of the rows before, float32, which it may add into; None:
there are none) -> that of these rows too"""


class Due(NamedTuple):
    """A gradient that was put off. source: the device whose rows it is of, where a weight has a gradient for the rows
    of each (`spread_experts`)."""

    weight: Tensor
    gradient: WeightGradient
    source: int | None = None


@dataclass(frozen=True)
class WholeGradient:
    """A `WeightGradient` that has the rows of all devices in it: a program hands them on by itself."""

    made: Callable[[], Tensor]

    def __call__(self) -> Tensor:
        return self.made()


class WeightQueue:
    """Weight gradients that backward passes have put off since `take` was last called, each with its weight."""

    def __init__(self) -> None:
        self._work: list[Due] = []

    def put(self, weight: Tensor, gradient: WeightGradient, source: int | None = None) -> None:
        self._work.append(Due(weight, gradient, source))

    def take(self) -> list[Due]:
        """What was queued, in order; the queue is empty afterwards."""
        found, self._work = self._work, []
        return found


@dataclass(frozen=True)
class LinearForm:
    """A linear layer as its four products; calling it is an operator like `linear`.

    product: (x, weight or pack, bias, out_dtype). input_gradient: (dy, weight). weight_gradient: (dy, x, that of the
    rows before or None).
    bias_gradient: (dy). queue: where the weight's gradient goes instead of being computed in the backward pass.
    gathered: x is own rows, and the product one of all rows. spread: the product gives own rows (`row_shards`).
    """

    product: Callable[..., Tensor]
    input_gradient: Callable[[Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    bias_gradient: Callable[[Tensor], Tensor]
    queue: WeightQueue | None = None
    gathered: SharedRows | None = None
    spread: SharedRows | None = None

    def __call__(
        self, x: Tensor, weight: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if self.spread is not None:
            self.spread.release()
        whole = None if self.gathered is None else self.gathered.of(x)
        if not isinstance(weight, Tensor):
            refuse_gradient("a product with a packed weight", x)
            return self.product(x if whole is None else whole.tensor, weight, bias, out_dtype)
        if whole is not None and torch.is_grad_enabled() and weight.requires_grad:
            whole.expect_reader()
        y: Tensor = _Linear.apply(x, weight, bias, out_dtype, self, whole)
        return y


@first_order
class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, form: LinearForm,
        whole: Whole | None,
    ) -> Tensor:  # fmt: skip
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.weight = weight  # the parameter itself: a tensor that is saved may come back as another object
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.form, ctx.whole = form, whole
        return form.product(x if whole is None else whole.tensor, weight.detach(), bias, out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Without the graph that made it, which a gradient that waits would keep.
        x, weight, form, whole = ctx.saved_tensors[0].detach(), ctx.weight, ctx.form, ctx.whole
        dy = grads[0].to(x.dtype).contiguous()
        if form.spread is not None:
            dy = form.spread.rows.gather(dy)
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dx = form.input_gradient(dy, weight.detach()) if need_x else None
        db = form.bias_gradient(dy).to(ctx.bias_dtype) if need_bias else None

        def weight_gradient(before: Tensor | None = None) -> Tensor:
            read = x if whole is None else whole.again(x)
            return form.weight_gradient(dy, read, before).to(weight.dtype)

        dw = None
        if need_weight and (form.queue is None or not weight.is_leaf):  # a part of a parameter cannot wait
            dw = weight_gradient()
        elif need_weight:
            form.queue.put(weight, weight_gradient)
        return dx, dw, db, None, None, None


def deferring(ops: Operators, queue: WeightQueue) -> Operators:
    """The operators with linear layers that put their weights' gradients into the queue; the bits are the same."""
    cut = {how: replace(found, linear=replace(found.linear, queue=queue)) for how, found in ops.cut.items()}
    return replace(ops, linear=replace(whole_linear(ops), queue=queue), cut=cut)


def whole_linear(ops: Operators) -> LinearForm:
    """The linear layer that is not cut, as its products."""
    return ops.linear if isinstance(ops.linear, LinearForm) else _WHOLE[ops.numerics]


def cut_operators(
    ops: Operators, segments: int, here: int, add: Add, over: str = "", shards: Rows | None = None
) -> Operators:
    """The operators of a device that holds ``here`` of the N segments of what is cut.

    segments: N, a power of two; 1 leaves the operators as they are. over: what `add` adds over, in words. shards: where
    devices hold a share of the rows of activations between cut products (sequence parallelism).
    """
    if segments == 1:
        return ops
    whole, shared = whole_linear(ops), None if shards is None else SharedRows(shards)
    total: Add = add if shards is None else shards.add
    columns = replace(
        whole, input_gradient=lambda dy, weight: _over_outputs(ops, dy, weight, here, total), gathered=shared
    )
    rows = replace(
        whole, product=lambda x, weight, bias, out: _over_inputs(ops, x, weight, bias, out, here, total), spread=shared
    )
    cut: dict[Split, CutProduct] = {
        "columns": CutProduct(columns, ops.pack),
        "rows": CutProduct(
            rows, lambda weight, dtype: [ops.pack(part, dtype) for part in contiguous_parts(weight, 1, here)]
        ),
    }
    norm = lambda *given, **named: _head_norm(ops, here, add, *given, **named)  # noqa: E731
    found = replace(ops, cut=cut, rms_norm=norm, cut_as=f"{ops.cut_as} {here} of {segments} segments {over}".strip())
    return found if shards is None else on_rows(found, shards)


def _over_inputs(
    ops: Operators, x: Tensor, weight: Any, bias: Tensor | None, out_dtype: torch.dtype | None, here: int, add: Add
) -> Tensor:
    """x [T, k] over this device's segments of the input's width, to [T, N]."""
    weights = weight if isinstance(weight, list) else contiguous_parts(weight, 1, here)
    products = [
        ops.linear(part, w, None, out_dtype=torch.float32)
        for part, w in zip(contiguous_parts(x, 1, here), weights, strict=True)
    ]
    dtype = out_dtype or x.dtype
    if bias is None:
        return add(neighbour_sum(products), dtype)
    return (add(neighbour_sum(products), torch.float32) + bias.detach().to(x.dtype).float()).to(dtype)


def _over_outputs(ops: Operators, dy: Tensor, weight: Tensor, here: int, add: Add) -> Tensor:
    """dx [T, K] from this device's segments of the output's width."""
    gradient = _FLOAT32_INPUT_GRADIENT[ops.numerics]
    parts = zip(contiguous_parts(dy, 1, here), contiguous_parts(weight, 0, here), strict=True)
    return add(neighbour_sum([gradient(d, w) for d, w in parts]), dy.dtype)


def _head_norm(
    ops: Operators, here: int, add: Add, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`rms_norm`; over heads [T, H, d], which are cut, the weight's gradient is added up by segments of heads."""
    if x.dim() < 3 or not (torch.is_grad_enabled() and weight.requires_grad):
        return ops.rms_norm(x, weight, eps, offset, out_dtype)
    weights = _Copies.apply(weight, here, add)
    parts = zip(x.tensor_split(here, dim=1), weights, strict=True)
    return torch.cat([ops.rms_norm(part, w, eps, offset, out_dtype) for part, w in parts], dim=1)


@first_order
class _Copies(Function):
    """A weight for each segment here; backward adds their gradients, and those of other devices, by the tree."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, here: int, add: Add) -> tuple[Tensor, ...]:
        ctx.add = add
        return tuple(weight.detach().clone() for _ in range(here))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.add(neighbour_sum(list(grads)), torch.float32), None, None


def alone(total: Tensor, dtype: torch.dtype) -> Tensor:
    """The `Add` of a single device."""
    return total.to(dtype)


def _fast_weight_gradient(dy: Tensor, x: Tensor, before: Tensor | None) -> Tensor:
    return dy.T @ x if before is None else before + dy.T @ x


def _fast_input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    return dy @ weight.to(dy.dtype)


_WHOLE: Mapping[str, LinearForm] = {
    "bitwise": LinearForm(
        contract.linear, contract.input_gradient, contract.weight_gradient,
        lambda dy: kernel.column_sums(dy),
    ),
    "fast": LinearForm(plain.linear, _fast_input_gradient, _fast_weight_gradient, lambda dy: dy.sum(0)),
}  # fmt: skip
"""The layer as one device computes it whole, in each numerics mode."""

_FLOAT32_INPUT_GRADIENT: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bitwise": lambda dy, weight: contract.input_gradient(dy, weight, torch.float32),
    "fast": lambda dy, weight: _fast_input_gradient(dy, weight).float(),
}
