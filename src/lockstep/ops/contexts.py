"""Context parallelism: each device holds a run of a micro-batch's rows, and in attention all rows of some heads.

What is made of a row alone is a device's share. Around attention rows and heads are exchanged (DeepSpeed-Ulysses, arXiv
2309.14509), so attention is that of a single device: whole sequences, keys in fixed blocks from position 0 (contract
C1). What sums over rows goes on from device to device in the order of the rows; weights' gradients are put off, so that
they follow each other (`lockstep.parallel.pipeline`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor
from torch.autograd import Function

from lockstep.ops.batch import Packed
from lockstep.ops.cut_linear import whole_linear
from lockstep.ops.first_order import first_order
from lockstep.ops.operators import Operators
from lockstep.ops.row_shards import Rows, on_rows


class HeadRows(Rows, Protocol):
    """Devices that share rows, and can exchange them for heads."""

    def to_heads(self, own: Tensor) -> Tensor:
        """Own rows [t, H, d] -> all rows of this device's run of the heads, [T, H / devices, d]."""

    def to_rows(self, heads: Tensor) -> Tensor:
        """The other way round."""


def on_contexts(ops: Operators, rows: HeadRows, captured: bool = False) -> Operators:
    """The operators of a device that holds a run of the rows. Keys have at least a head for every device.

    captured: for a graph, in which weights' gradients are handed on where they are made: nothing puts them off.
    """
    linear = whole_linear(ops)
    own = on_rows(ops, rows, heads=True)

    def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        return ops.rope(x, rows.own(positions), table)

    def attention(q: Tensor, k: Tensor, v: Tensor, batch: Packed, *given: Any) -> Tensor:
        q, k, v = (_ToHeads.apply(x, rows) for x in (q, k, v))
        y: Tensor = _ToRows.apply(ops.attention(q, k, v, batch, *given), rows)
        return y

    def bias_gradient(dy: Tensor) -> Tensor:
        return linear.bias_gradient(rows.gather(dy))

    def weight_gradient(dy: Tensor, x: Tensor, _: Tensor | None) -> Tensor:
        return rows.hand_on(lambda before: linear.weight_gradient(dy, x, before), (dy.shape[1], x.shape[1]))

    here = replace(linear, bias_gradient=bias_gradient)
    if captured:
        here = replace(here, weight_gradient=weight_gradient)
    return replace(own, rope=rope, attention=attention, linear=here, cut_as="rows over contexts")


@first_order
class _ToHeads(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: HeadRows) -> Tensor:
        ctx.rows = rows
        return rows.to_heads(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.rows.to_rows(grads[0]), None


@first_order
class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, rows: HeadRows) -> Tensor:
        ctx.rows = rows
        return rows.to_rows(heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.rows.to_heads(grads[0]), None
