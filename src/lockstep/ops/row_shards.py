"""Sequence parallelism: between products that are cut, each device holds some rows (tokens) of an activation only.

Norms, sums of the residual stream and what they keep for the backward pass are then a device's share (Megatron-LM,
arXiv 2205.05198). A product cut by columns gathers its input's rows, one cut by rows gives each device its rows of the
sum; backward the other way round. Every row is computed as by a single device, and what sums over rows goes on from
device to device in the order of the rows, so the bits are those without it (contract C4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.ops.first_order import first_order
from lockstep.ops.operators import Operators
from lockstep.ops.raw import kernel


class Rows(Protocol):
    """A group of devices of which each holds a run of the T rows, in their order. All must call alike."""

    def own(self, whole: Tensor) -> Tensor:
        """This device's rows of [T, ...], a view."""

    def gather(self, own: Tensor) -> Tensor:
        """All rows [T, ...] from every device's own."""

    def add(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Own rows of the sum of every device's float32 [T, ...], by the tree over devices, rounded once to dtype."""

    def total(self, part: Tensor) -> Tensor:
        """The sum of every device's tensor by the tree, the same on each."""

    def hand_on(self, go_on: Callable[[Tensor | None], Tensor], shape: Sequence[int]) -> Tensor:
        """A float32 value that each device makes from that of the one before (None: the first); all get the last's."""


class Whole:
    """All rows of a tensor while somebody reads them; backward they are gathered again, once for all readers."""

    def __init__(self, rows: Rows, own: Tensor) -> None:
        self._rows, self._readers = rows, 0
        self.tensor: Tensor | None = rows.gather(own)

    def expect_reader(self) -> None:
        """One more product will ask for the rows in its backward."""
        self._readers += 1

    def again(self, own: Tensor) -> Tensor:
        """All rows, for a backward pass; the last reader that was expected leaves nothing behind."""
        whole = self._rows.gather(own) if self.tensor is None else self.tensor
        self._readers -= 1
        self.tensor = whole if self._readers else None
        return whole


class SharedRows:
    """Lets the products that read one tensor (query, key and value; gate and up) gather its rows once."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self._last: tuple[Tensor, Whole] | None = None

    def of(self, own: Tensor) -> Whole:
        """All rows of the tensor of which this device has its own."""
        if self._last is None or self._last[0] is not own:
            self._last = own, Whole(self.rows, own.contiguous())
        return self._last[1]

    def release(self) -> None:
        """The branch that read the last tensor is at its end: its rows go, up to the backward."""
        if self._last is not None:
            self._last[1].tensor = None
            self._last = None


def on_rows(ops: Operators, rows: Rows, heads: bool = False) -> Operators:
    """The operators around the cut products: embedding gives own rows, norms of [T, D] take them, the loss gathers.

    heads: norms over heads [T, H, d] are of own rows too. Otherwise they stand between cut products, where every device
    has all rows.
    """
    norm = _contract_norm if ops.numerics == "bitwise" else _plain_norm

    def rms_norm(
        x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if x.dim() > 2 and not heads:
            return ops.rms_norm(x, weight, eps, offset, out_dtype)
        return norm(ops, rows, x, weight, eps, offset, out_dtype or x.dtype)

    def embedding(tokens: Tensor, weight: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        own: Tensor = _Own.apply(ops.embedding(tokens, weight, dtype, scale), rows)
        return own

    def linear_cross_entropy(hidden: Tensor, *given: Any, **named: Any) -> tuple[Tensor, ...]:
        return ops.linear_cross_entropy(_All.apply(hidden, rows), *given, **named)

    return replace(ops, rms_norm=rms_norm, embedding=embedding, linear_cross_entropy=linear_cross_entropy)


@first_order
class _Own(Function):
    """Own rows of what every device computed; its gradient is needed whole on each."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return rows.own(whole).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.rows.gather(grads[0].contiguous()), None


@first_order
class _All(Function):
    """All rows for what every device computes alike, so that each has the whole gradient, and keeps its rows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return rows.gather(own.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.rows.own(grads[0]), None


def _contract_norm(
    ops: Operators, rows: Rows, x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype
) -> Tensor:
    y: Tensor = _Norm.apply(x, weight, eps, offset, dtype, rows)
    return y


@first_order
class _Norm(Function):
    """`ops.norm.rms_norm` of own rows; the weight's gradient is one chain over the rows of all devices."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype, rows: Rows
    ) -> Tensor:
        x = x.contiguous()
        y, rstd = kernel.rms_norm(x, weight.detach().to(dtype), eps, offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset, ctx.rows = offset, rows
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dy = grads[0].contiguous()
        dx, first = kernel.rms_norm_backward(dy, x, weight.detach().to(dy.dtype), rstd, ctx.offset)

        def go_on(before: Tensor | None) -> Tensor:
            return first if before is None else kernel.rms_norm_weight_gradient(dy, x, rstd, before)

        return dx, ctx.rows.hand_on(go_on, first.shape).to(weight.dtype), None, None, None, None


def _plain_norm(
    ops: Operators, rows: Rows, x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype
) -> Tensor:
    return ops.rms_norm(x, _Everywhere.apply(weight, rows), eps, offset, dtype)


@first_order
class _Everywhere(Function):
    """A weight that every device uses on its own rows: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return weight.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.rows.total(grads[0].contiguous()), None
