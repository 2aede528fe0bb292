"""Collectives of a mesh: point-to-point messages and additions in a fixed order, counted per axis.

A sum over ranks is a binary tree of single float additions that only the number of ranks defines, so the bits do not
depend on a library's ring, on the network or on who is late (contracts C4, C5). Copies need no order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.ops.tree import tree_sum
from lockstep.parallel.mesh import AXES, MeshShape
from lockstep.parallel.transport import NoTransport, Pending, Transport

Steps = Generator[bool, None, Tensor]
"""A sum on its way: pauses after it sent something, with whether it will send more."""
_LARGE = 1 << 16
"""Bytes from which on a message's size counts more than one more message."""


@dataclass
class Traffic:
    """What a rank sent along an axis since it was last read."""

    calls: int = 0
    bytes: int = 0


class Outbox:
    """What a rank has begun and not yet sent all of: at most one sum, whose later messages wait for earlier ones.

    Whoever begins the next message lets it send those first. So the messages between two ranks come in the order in
    which both begin what they belong to, whenever each waits for it; and ranks that begin in one order never wait for
    each other.
    """

    def __init__(self) -> None:
        self._unsent: Sum | None = None

    def leave(self, found: Sum) -> None:
        """A sum that has more to send; there is no other."""
        self._unsent = found

    def empty(self) -> None:
        """Send what is left."""
        found, self._unsent = self._unsent, None
        if found is not None:
            found.send()


class Axis:
    """This rank's group along one axis of the mesh. index: its place in it. outbox: one for all axes of a transport.

    Everybody in it must call alike: begin in one order. When to wait is each one's own matter.
    """

    def __init__(self, name: str, ranks: Sequence[int], transport: Transport, outbox: Outbox) -> None:
        self.name, self.ranks, self.transport, self.outbox = name, tuple(ranks), transport, outbox
        self.index = self.ranks.index(transport.rank)
        self.traffic = Traffic()

    @property
    def size(self) -> int:
        return len(self.ranks)

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Begin to send to the member at place ``to``."""
        self.outbox.empty()
        self.traffic.calls += 1
        self.traffic.bytes += tensor.nbytes
        return self.transport.send(tensor, self.ranks[to])

    def receive(self, out: Tensor, source: int) -> Pending:
        """Begin to receive from the member at place ``source``."""
        self.outbox.empty()
        return self.transport.receive(out, self.ranks[source])

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send ``outgoing[i]`` to member i and fill ``incoming[i]`` from it; empty tensors and our own do not move."""
        for work in self.begin_exchange(outgoing, incoming):
            work.wait()

    def begin_exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Pending]:
        """`exchange`, begun: it is done when all of these were waited for."""
        others = [i for i in range(self.size) if i != self.index]
        pending = [self.receive(incoming[i], i) for i in others if incoming[i].numel()]
        return pending + [self.send(outgoing[i].contiguous(), i) for i in others if outgoing[i].numel()]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every member's tensor, all of one shape, in the order of the axis."""
        found = [tensor if i == self.index else torch.empty_like(tensor) for i in range(self.size)]
        self.exchange([tensor.contiguous()] * self.size, found)
        return found

    def add(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The members' sum by the binary tree over their places, rounded to dtype (default: kept), the same on each.

        Two ways, the same bits: neighbours exchange and add, then pairs of neighbours, and so on; or, where that moves
        less and the tensor is large, each adds up a part of the elements and gives the rounded sums to the others.
        """
        return self.begin_add(tensor, dtype or tensor.dtype).wait()

    def begin_add(self, tensor: Tensor, dtype: torch.dtype) -> Sum:
        """`add`, begun: its first messages are on their way, and the tensor must not be changed until it has ended."""
        return Sum(self._adding(tensor, dtype), self.outbox)

    def _adding(self, tensor: Tensor, dtype: torch.dtype) -> Steps:
        """The sum; pauses where messages are on their way."""
        if self.size == 1:
            return tensor.to(dtype)
        if self.size & (self.size - 1):  # members in pairs as far as they go, as in `tree_sum`
            found = [tensor if i == self.index else torch.empty_like(tensor) for i in range(self.size)]
            yield from _arrived(self.begin_exchange([tensor.contiguous()] * self.size, found))
            return tree_sum(torch.stack(found)).to(dtype)
        whole, rounded = tensor.dtype.itemsize, dtype.itemsize
        doubling = (self.size.bit_length() - 1) * whole
        if tensor.nbytes >= _LARGE and (self.size - 1) / self.size * (whole + rounded) < doubling:
            return (yield from self._adding_parts(tensor, dtype))
        step = 1
        while step < self.size:
            partner = self.index ^ step
            theirs = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            step *= 2
            pending = [self.receive(theirs, partner), self.send(tensor.contiguous(), partner)]
            yield from _arrived(pending, more=step < self.size)
            tensor = tensor + theirs  # commutative: both sides get the same bits
        return tensor.to(dtype)

    def _adding_parts(self, tensor: Tensor, dtype: torch.dtype) -> Steps:
        parts = tensor.reshape(-1).tensor_split(self.size)
        total = yield from self._adding_part(parts, dtype, more=True)
        sums = [total if i == self.index else part.new_empty(part.shape, dtype=dtype) for i, part in enumerate(parts)]
        yield from _arrived(self.begin_exchange([total] * self.size, sums))
        return torch.cat(sums).view(tensor.shape)

    def add_part(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Our part of the members' sum, by the tree of `add` (a power of two members), rounded to dtype.

        parts: for each member what we have of its part.
        """
        return self.begin_add_part(parts, dtype).wait()

    def begin_add_part(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Sum:
        """`add_part`, begun."""
        return Sum(self._adding_part(parts, dtype), self.outbox)

    def _adding_part(self, parts: Sequence[Tensor], dtype: torch.dtype, more: bool = False) -> Steps:
        mine = [parts[self.index] if i == self.index else torch.empty_like(parts[self.index]) for i in range(self.size)]
        yield from _arrived(self.begin_exchange(parts, mine), more)
        while len(mine) > 1:
            mine = [left + right for left, right in zip(mine[::2], mine[1::2], strict=True)]
        return mine[0].to(dtype)

    def hand_on(self, go_on: Callable[[Tensor | None], Tensor], shape: Sequence[int]) -> Tensor:
        """A float32 value that goes along the axis: each member makes it from that of the one before (None: it is the
        first), and all get the last one's."""
        return self.hand_on_all([(go_on, shape)])[0]

    def hand_on_all(self, work: Iterable[tuple[Callable[[Tensor | None], Tensor], Sequence[int]]]) -> list[Tensor]:
        """`hand_on` of several values: a member works on one while the one before it works on the next."""
        last, values, sent = self.size - 1, list[Tensor](), list[Pending]()
        for go_on, shape in work:
            before = None
            if self.index > 0:
                before = torch.empty(tuple(shape))
                self.receive(before, self.index - 1).wait()
            values.append(go_on(before).contiguous())
            sent += [self.send(values[-1], i) for i in ([self.index + 1] if self.index < last else range(last))]
        for pending in sent:
            pending.wait()
        if self.index < last:
            for value in values:  # into the same memory: what was sent from it has gone
                self.receive(value, last).wait()
        return values

    def merge(self, tensor: Tensor) -> Tensor:
        """The sum of tensors of which every element is zero on all members but one: an exact gather."""
        return self.add(tensor)


class Sum:
    """A sum over ranks that was begun."""

    def __init__(self, steps: Steps, outbox: Outbox) -> None:
        outbox.empty()
        self._steps, self._outbox, self._more = steps, outbox, False
        self._total: Tensor | None = None
        self._go_on()
        if self._more:
            outbox.leave(self)

    def wait(self) -> Tensor:
        """The sum, when it is there."""
        if self._more:  # then it is the one in the outbox
            self._outbox.empty()
        while self._total is None:
            self._go_on()
        return self._total

    def send(self) -> None:
        """Send everything, which may have to wait for what others send first; its end is for `wait`."""
        while self._more:
            self._go_on()

    def _go_on(self) -> None:
        try:
            self._more = next(self._steps)
        except StopIteration as end:
            self._total = end.value


def _arrived(pending: list[Pending], more: bool = False) -> Generator[bool, None, None]:
    """Pause, then wait for messages. more: whether others will be sent then."""
    yield more
    for work in pending:
        work.wait()


class Mesh:
    """A rank's view of the mesh: its place, and the groups that it belongs to.

    Passed to whatever needs it; there is no global one.
    """

    def __init__(self, shape: MeshShape, transport: Transport) -> None:
        shape.check_world(transport.size)
        self.shape, self.rank, self.transport = shape, transport.rank, transport
        self.place = shape.place(self.rank)
        names, outbox = (*AXES, "ep", "edp"), Outbox()
        self.axes = {axis: Axis(axis, shape.group(self.rank, axis), transport, outbox) for axis in names}
        self.world = Axis("world", range(shape.size), transport, outbox)

    def __getitem__(self, axis: str) -> Axis:
        return self.axes[axis]

    @property
    def first(self) -> bool:
        """Whether this rank does what one alone does: writes files, shows progress."""
        return self.rank == 0

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """The first rank goes through the block while the others wait, then the others do: for shared files."""
        if not self.first:
            self.world.gather(torch.zeros(1))
        yield
        if self.first:
            self.world.gather(torch.zeros(1))

    def take_traffic(self) -> dict[str, Traffic]:
        """Calls and bytes that this rank sent since the last time, by axis (those with any), and start anew."""
        found = {}
        for axis in (*self.axes.values(), self.world):
            if axis.traffic.calls:
                found[axis.name] = axis.traffic
            axis.traffic = Traffic()
        return found


def single() -> Mesh:
    """The mesh of one rank."""
    return Mesh(MeshShape(), NoTransport())
