"""Expert parallelism: each device holds some of a layer's experts; rows go to where their experts are, and back.

GShard (arXiv 2006.16668). Every device has a micro-batch of its own, routes it, and sends each expert's rows to the one
that holds it. A row's products do not depend on the rows beside it (contract C1), and nothing is added on the way, so
its bits are those of a device that holds all experts. A weight gets one gradient for the rows of each device, tokens
ascending: that of its micro-batch, which the tree over micro-batches then adds (contract C5).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.ops.cut_linear import WeightQueue
from lockstep.ops.first_order import first_order
from lockstep.ops.gated import code_of
from lockstep.ops.operators import Operators
from lockstep.ops.raw import kernel

Weight = TypeVar("Weight")


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
    return replace(ops, experts=SpreadExperts(devices))


def queueing(ops: Operators, queue: WeightQueue) -> Operators:
    """The operators of `spread_experts` whose weights' gradients go into the queue, one for each device's rows."""
    return replace(ops, experts=replace(ops.experts, queue=queue))  # type: ignore[type-var]


class SharedExperts(ABC):
    """`Operators.experts` of a device that holds some of them."""

    devices: Devices

    def __call__(
        self,
        rows: Tensor,
        gates: Sequence[Tensor],
        ups: Sequence[Tensor],
        downs: Sequence[Tensor],
        offsets: Tensor,
        activation: str,
    ) -> Tensor:
        """rows [T k, D] of this device's tokens, by expert; weights of all experts -> [T k, D]."""
        return self.products(rows, offsets, code_of(activation), own_weights(self.devices, gates, ups, downs))

    @abstractmethod
    def products(self, rows: Tensor, offsets: Tensor, code: int, weights: Sequence[Tensor]) -> Tensor:
        """The same with the weights here."""


@dataclass(frozen=True)
class SpreadExperts(SharedExperts):
    """Those that run at once."""

    devices: Devices
    queue: WeightQueue | None = None

    def products(self, rows: Tensor, offsets: Tensor, code: int, weights: Sequence[Tensor]) -> Tensor:
        y: Tensor = _Spread.apply(rows, offsets, code, self, *weights)
        return y


class Kept(NamedTuple):
    """What a layer's experts keep for the backward pass.

    out: rows for each device; back: rows R that came from each. held: int32 [devices x E / devices + 1], where the rows
    begin that came from a device for an expert of ours, by device, then by expert, then by token. x [R, D]: those rows;
    gate, up, y [R, F]: their products and the gated one.
    """

    out: list[int]
    back: list[int]
    held: Tensor
    x: Tensor
    gate: Tensor
    up: Tensor
    y: Tensor

    @property
    def way(self) -> tuple[list[int], list[int]]:
        """The numbers: `Kept(*way, *tensors)` is the whole."""
        return self.out, self.back

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.held, self.x, self.gate, self.up, self.y


class Late(NamedTuple):
    """A gradient that was put off: of which of the weights here (gates, ups, downs), for the rows of which device."""

    weight: int
    source: int
    gradient: Callable[[], Tensor]


def forward(
    rows: Tensor, offsets: Tensor, weights: Sequence[Tensor], code: int, devices: Devices, into: Tensor | None = None
) -> tuple[Tensor, Kept]:
    """Send, compute with the weights here (gates, ups, downs), send back. into: takes the result."""
    gates, ups, downs = (_values(part) * devices.size for part in _thirds(weights))
    out, back, held = _met(offsets, len(rows), devices)
    x = _moved(rows, out, back, devices)
    y, gate, up = kernel.grouped_gated_product(x, held, gates, ups, code, True)
    product = kernel.grouped_product(y, held, downs, False)
    return _moved(product, back, out, devices, into), Kept(out, back, held, x, gate, up, y)


def backward(
    dy: Tensor, kept: Kept, weights: Sequence[Tensor], code: int, devices: Devices, into: Tensor | None = None
) -> tuple[Tensor, list[Late]]:
    """The gradient of the rows, and those of the weights here, for the rows of every device, which are put off."""
    out, back, held = kept[:3]
    gates, ups, downs = _thirds(weights)
    dy = _moved(dy, out, back, devices).to(kept.x.dtype)
    slopes = kernel.gated_backward(_input_gradient(dy, held, downs, devices), kept.gate, kept.up, code)
    dx = _input_gradient(slopes[1], held, ups, devices)
    dx += _input_gradient(slopes[0], held, gates, devices)  # in place: nothing that came waits while rows travel
    late = _late(0, slopes[0], kept.x, held, devices)
    late += _late(len(gates), slopes[1], kept.x, held, devices)
    late += _late(2 * len(gates), dy, kept.y, held, devices)
    return _moved(dx, back, out, devices, into), late


def own_weights(devices: Devices, *parts: Sequence[Weight]) -> list[Weight]:
    """Of all experts' weights (gates, ups, downs), those here."""
    here = len(parts[0]) // devices.size
    return [weight for part in parts for weight in part[devices.index * here : (devices.index + 1) * here]]


@first_order
class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, offsets: Tensor, code: int, form: SpreadExperts, *weights: Tensor) -> Tensor:
        y, kept = forward(rows, offsets, weights, code, form.devices)
        ctx.save_for_backward(*kept.tensors)
        ctx.way, ctx.code, ctx.form = kept.way, code, form
        ctx.weights = weights  # the parameters themselves, as in `cut_linear`
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, form = Kept(*ctx.way, *ctx.saved_tensors), ctx.form
        dx, late = backward(grads[0], kept, ctx.weights, ctx.code, form.devices)
        if any(ctx.needs_input_grad[4:]):
            assert form.queue is not None, "gradients of spread experts need a queue: `queueing`"
            for one in late:
                form.queue.put(ctx.weights[one.weight], one.gradient, one.source)
        return dx, None, None, None, *[None] * len(ctx.weights)


def _met(offsets: Tensor, rows: int, devices: Devices) -> tuple[list[int], list[int], Tensor]:
    """Devices tell each other how many rows they will send for each expert. On the meta device, where rows have no
    numbers, every expert counts as chosen alike."""
    experts, size = len(offsets) - 1, devices.size
    if offsets.is_meta:
        out = [stop - start for start, stop in pairwise(rows * i // size for i in range(size + 1))]
        return out, [out[devices.index]] * size, offsets.new_empty(experts + 1)
    counts = offsets.diff().view(size, experts // size)
    came = counts.clone()  # of which our own row is right already
    devices.exchange(list(counts), list(came))
    held = torch.nn.functional.pad(came.flatten().cumsum(0), (1, 0)).to(torch.int32)
    return counts.sum(1).tolist(), came.sum(1).tolist(), held


def _moved(rows: Tensor, out: list[int], back: list[int], devices: Devices, into: Tensor | None = None) -> Tensor:
    """Rows to other devices and theirs to here. out, back: rows for each device, and from each."""
    rows = rows.contiguous()
    found = rows.new_empty(sum(back), rows.shape[1]) if into is None else into
    outgoing, incoming = rows.split(out), found.split(back)
    incoming[devices.index].copy_(outgoing[devices.index])
    devices.exchange(outgoing, incoming)
    return found


def _input_gradient(dy: Tensor, groups: Tensor, weights: Sequence[Tensor], devices: Devices) -> Tensor:
    dx: Tensor = kernel.grouped_product(dy, groups, _values(weights) * devices.size, True)
    return dx


def _late(first: int, dy: Tensor, x: Tensor, groups: Tensor, devices: Devices) -> list[Late]:
    """A gradient of every weight of a kind (numbered from `first`) for the rows of every device."""
    found, here = [], (len(groups) - 1) // devices.size
    for source in range(devices.size):
        made = _Stack(partial(_weight_gradients, dy, x, groups, source, devices.size))
        found += [Late(first + expert, source, partial(made.take, expert)) for expert in range(here)]
    return found


def _weight_gradients(dy: Tensor, x: Tensor, groups: Tensor, source: int, size: int) -> list[Tensor]:
    """Float32 [N, K] of every expert here, for the rows that came from one device."""
    here = (len(groups) - 1) // size
    own = groups[source * here : (source + 1) * here + 1]
    if groups.is_meta:  # as many rows from each
        start, stop = (len(x) * i // size for i in (source, source + 1))
    else:
        start, stop = int(own[0]), int(own[-1])
    stacked = kernel.grouped_weight_gradient(dy[start:stop], x[start:stop], own - own[0])
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


def _thirds(weights: Sequence[Tensor]) -> tuple[Sequence[Tensor], ...]:
    """Gates, ups, downs."""
    here = len(weights) // 3
    return weights[:here], weights[here : 2 * here], weights[2 * here :]


def _values(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.detach().contiguous() for weight in weights]
