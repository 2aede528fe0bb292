"""Expert parallelism: each device holds some of a layer's experts; rows go to where their experts are, and back.

GShard (arXiv 2006.16668). Every device has a micro-batch of its own, routes it, and sends each expert's rows to the one
that holds it. A row's products do not depend on the rows beside it (contract C1), and nothing is added on the way, so
its bits are those of a device that holds all experts. A weight gets one gradient for the rows of each device, tokens
ascending: that of its micro-batch, which the tree over micro-batches then adds (contract C5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.ops.batch import Routes, Routing
from lockstep.ops.cut_linear import WeightQueue
from lockstep.ops.gated import CODES
from lockstep.ops.operators import ExpertProducts, Operators


class Devices(Protocol):
    """The devices among which experts are spread, in equal runs. All must call alike."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int:
        """This device's place."""

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send ``outgoing[i]`` to device i and fill ``incoming[i]`` from it, but for our own."""


def spread_experts(ops: Operators, devices: Devices) -> Operators:
    """The operators of a device that holds its run of every layer's experts; the weights of others may have no values.

    Products are the contract's in both numerics. Gradients of experts' weights need `queueing`.
    """

    def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> Routes:
        return _met(ops.route(logits, routing, bias), devices)

    def dispatch(x: Tensor, routes: SentRoutes) -> Tensor:
        rows: Tensor = _Sent.apply(ops.dispatch(x, routes), routes.out, routes.back, devices)
        return rows

    def combine(y: Tensor, routes: SentRoutes) -> Tensor:
        return ops.combine(_Sent.apply(y, routes.back, routes.out, devices), routes)

    products = ExpertProducts(SpreadGated(devices), SpreadLinear(devices))
    return replace(ops, route=route, dispatch=dispatch, combine=combine, experts=products)


def queueing(ops: Operators, queue: WeightQueue) -> Operators:
    """The operators of `spread_experts` whose weights' gradients go into the queue, one for each device's rows."""
    assert ops.experts is not None
    gated, linear = (replace(form, queue=queue) for form in (ops.experts.gated, ops.experts.linear))
    return replace(ops, experts=ExpertProducts(gated, linear))


@dataclass(frozen=True)
class SentRoutes(Routes):
    """Routes of rows that go to other devices. out: rows for each device; back: rows that come from each.

    held: int32 [devices x E / devices + 1], where the rows begin that came from a device for an expert of ours, by
    device, then by expert, then by token.
    """

    out: list[int]
    back: list[int]
    held: Tensor

    @property
    def groups(self) -> Tensor:
        return self.held


@dataclass(frozen=True)
class SpreadGated:
    """`grouped_gated` of the experts here."""

    devices: Devices
    queue: WeightQueue | None = None

    def __call__(
        self, x: Tensor, gates: Sequence[Tensor], ups: Sequence[Tensor], groups: Tensor, activation: str
    ) -> Tensor:
        """x [R, K], rows that came; gates and ups of all experts, each [F, K]; groups: `SentRoutes.held` -> [R, F]."""
        here = (*_own(gates, self.devices), *_own(ups, self.devices))
        y: Tensor = _Gated.apply(x, groups, CODES[activation], self, *here)
        return y


@dataclass(frozen=True)
class SpreadLinear:
    """`grouped_linear` with the experts here."""

    devices: Devices
    queue: WeightQueue | None = None

    def __call__(self, x: Tensor, weights: Sequence[Tensor], groups: Tensor) -> Tensor:
        """x [R, K], rows that came; weights of all experts, each [N, K]; groups: `SentRoutes.held` -> [R, N]."""
        y: Tensor = _Linear.apply(x, groups, self, *_own(weights, self.devices))
        return y


def _met(routes: Routes, devices: Devices) -> SentRoutes:
    """Devices tell each other how many rows they will send for each expert. On the meta device, where rows have no
    numbers, every expert counts as chosen alike."""
    experts, size = len(routes.offsets) - 1, devices.size
    if routes.offsets.is_meta:
        out = [stop - start for start, stop in pairwise(len(routes.rows) * i // size for i in range(size + 1))]
        held = routes.offsets.new_empty(experts + 1)
        return SentRoutes(**vars(routes), out=out, back=[out[devices.index]] * size, held=held)
    counts = routes.offsets.diff().view(size, experts // size)
    came = counts.clone()  # of which our own row is right already
    devices.exchange(list(counts), list(came))
    held = torch.nn.functional.pad(came.flatten().cumsum(0), (1, 0)).to(torch.int32)
    return SentRoutes(**vars(routes), out=counts.sum(1).tolist(), back=came.sum(1).tolist(), held=held)


class _Sent(Function):
    """Rows to other devices; backward their gradients come back. out, back: rows for each device, and from each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, out: list[int], back: list[int], devices: Devices) -> Tensor:
        ctx.way = out, back, devices
        return _moved(rows, out, back, devices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, back, devices = ctx.way
        return _moved(grads[0], back, out, devices), None, None, None


def _moved(rows: Tensor, out: list[int], back: list[int], devices: Devices) -> Tensor:
    rows = rows.contiguous()
    found = rows.new_empty(sum(back), rows.shape[1])
    outgoing, incoming = rows.split(out), found.split(back)
    incoming[devices.index].copy_(outgoing[devices.index])
    devices.exchange(outgoing, incoming)
    return found


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Tensor, code: int, form: SpreadGated, *weights: Tensor) -> Tensor:
        """weights: the gates here, then as many ups."""
        gates, ups = _halves(weights)
        values = [_values(side) * form.devices.size for side in (gates, ups)]
        y, gate, up = torch.ops.lockstep.grouped_gated_product(x, groups, *values, code, True)
        ctx.save_for_backward(x, groups, gate, up)
        ctx.weights, ctx.code, ctx.form = weights, code, form  # the parameters themselves, as in `cut_linear`
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, groups, gate, up = ctx.saved_tensors
        sides, form = _halves(ctx.weights), ctx.form
        slopes = torch.ops.lockstep.gated_backward(grads[0].contiguous(), gate, up, ctx.code)
        of_gate, of_up = (_input_gradient(d, groups, side, form.devices) for d, side in zip(slopes, sides, strict=True))
        if any(ctx.needs_input_grad[4:]):
            for d, side in zip(slopes, sides, strict=True):
                _put_off(form, d, x, groups, side)
        return of_up + of_gate, None, None, None, *[None] * len(ctx.weights)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Tensor, form: SpreadLinear, *weights: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, groups)
        ctx.weights, ctx.form = weights, form
        return torch.ops.lockstep.grouped_product(x, groups, _values(weights) * form.devices.size, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, groups), weights, form = ctx.saved_tensors, ctx.weights, ctx.form
        dy = grads[0].to(x.dtype).contiguous()
        if any(ctx.needs_input_grad[3:]):
            _put_off(form, dy, x, groups, weights)
        return _input_gradient(dy, groups, weights, form.devices), None, None, *[None] * len(weights)


def _input_gradient(dy: Tensor, groups: Tensor, weights: Sequence[Tensor], devices: Devices) -> Tensor:
    dx: Tensor = torch.ops.lockstep.grouped_product(dy, groups, _values(weights) * devices.size, True)
    return dx


def _put_off(
    form: SpreadGated | SpreadLinear, dy: Tensor, x: Tensor, groups: Tensor, weights: Sequence[Tensor]
) -> None:
    """Queue a gradient of every weight for the rows of every device."""
    assert form.queue is not None, "gradients of spread experts need a queue: `queueing`"
    for source in range(form.devices.size):
        made = _Stack(partial(_weight_gradients, dy, x, groups, source, form.devices.size))
        for expert, weight in enumerate(weights):
            form.queue.put(weight, partial(made.take, expert), source)


def _weight_gradients(dy: Tensor, x: Tensor, groups: Tensor, source: int, size: int) -> list[Tensor]:
    """Float32 [N, K] of every expert here, for the rows that came from one device."""
    here = (len(groups) - 1) // size
    own = groups[source * here : (source + 1) * here + 1]
    if groups.is_meta:  # as many rows from each
        start, stop = (len(x) * i // size for i in (source, source + 1))
    else:
        start, stop = int(own[0]), int(own[-1])
    stacked = torch.ops.lockstep.grouped_weight_gradient(dy[start:stop], x[start:stop], own - own[0])
    return [stacked[i] for i in range(here)]  # views that may be added into


class _Stack:
    """Gradients that one kernel makes together, when the first of them is asked for; each is taken once."""

    def __init__(self, make: Callable[[], list[Tensor]]) -> None:
        self._make: Callable[[], list[Tensor]] | None = make
        self._made: dict[int, Tensor] = {}

    def take(self, place: int) -> Tensor:
        if self._make is not None:
            self._made, self._make = dict(enumerate(self._make())), None
        return self._made.pop(place)


def _own(weights: Sequence[Tensor], devices: Devices) -> list[Tensor]:
    """Of all experts' weights, those here."""
    here = len(weights) // devices.size
    return list(weights[devices.index * here : (devices.index + 1) * here])


def _halves(weights: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return weights[: len(weights) // 2], weights[len(weights) // 2 :]


def _values(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.detach().contiguous() for weight in weights]
