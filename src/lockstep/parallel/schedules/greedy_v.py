"""ZB-V for times that are not equal: the V placement built greedily, weight gradients placed where they cost least.

The hand-made ZB-V has no bubble if F = B = W. For other times the order of F and B is kept in its shape (rounds of
gradients going up chunk 1 and down chunk 0, each followed by a round of forwards), but a weight gradient waits until it
fills a gap, or until its memory is needed (arXiv 2405.15362, its schedule for uneven times).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep.parallel.schedules.table import ScheduleError, Step, Table
from lockstep.parallel.schedules.times import StageTimes
from lockstep.parallel.schedules.timing import longest_span
from lockstep.parallel.schedules.v_shape import zb_v


@dataclass
class _Device:
    cost: dict[str, list[float]]  # of every kind, by chunk
    idle_before: float  # its bubble in the previous attempt
    steps: list[Step] = field(default_factory=list)
    ends: dict[tuple[str, int], list[float]] = field(
        default_factory=lambda: {(k, c): [] for k in "FBW" for c in (0, 1)}
    )
    weights: deque[int] = field(default_factory=deque)  # the chunks of the pending weight gradients
    now: float = 0.0
    held: int = 0  # in chunks
    idle: float = 0.0

    def done(self, kind: str, chunk: int) -> int:
        return len(self.ends[kind, chunk])


class _Builder:
    def __init__(self, devices: list[_Device], micro_batches: int, comm: float, fill: tuple[bool, bool]) -> None:
        self.devices, self.micro_batches, self.comm = devices, micro_batches, comm
        self.fill_before_forward, self.fill_before_backward = fill
        self.cap = 2 * len(devices)
        down, up = [None, *devices[:-1]], [*devices[1:], None]
        local: list[_Device | None] = [None] * len(devices)
        # The neighbour that the input of a step comes from; None if it comes from the same device.
        self.sources = {("F", 0): down, ("F", 1): up, ("B", 1): down, ("B", 0): up, ("W", 0): local, ("W", 1): local}
        self.change = {"F": 1, "B": 0, "W": -1}
        self.most_idle = 0.0
        self.most_before = max(device.idle_before for device in devices)

    def build(self) -> None:
        self.warm_up()
        for _ in range(2 * self.micro_batches):
            self.backwards()
            for s in range(len(self.devices)):
                self.forward(s)
        for s, device in enumerate(self.devices):
            while device.weights:
                self.put_weight(s)

    def put(self, s: int, kind: str, chunk: int) -> None:
        device = self.devices[s]
        ends = device.ends[kind, chunk]
        start = max(device.now, self.arrival(s, kind, chunk) or 0.0)
        if start > device.now and device.steps:
            device.idle += start - device.now
            self.most_idle = max(self.most_idle, device.idle)
        device.now = start + device.cost[kind][chunk]
        device.held += self.change[kind]
        device.steps.append(Step(kind, len(ends), chunk))
        ends.append(device.now)
        if kind == "B":
            device.weights.append(chunk)

    def put_weight(self, s: int) -> None:
        self.put(s, "W", self.devices[s].weights.popleft())

    def arrival(self, s: int, kind: str, chunk: int) -> float | None:
        """When the input of the next such step arrives from a neighbour; None if it is here, or not yet planned."""
        source = self.sources[kind, chunk][s]
        if source is None:
            return None
        made, number = source.ends[kind, chunk], len(self.devices[s].ends[kind, chunk])
        return made[number] + self.comm if number < len(made) else None

    def planned(self, s: int, kind: str, chunk: int) -> bool:
        """Whether what produces the input of the next such step has been placed."""
        source = self.sources[kind, chunk][s]
        return source is None or len(self.devices[s].ends[kind, chunk]) < len(source.ends[kind, chunk])

    def left(self, s: int, kind: str, chunk: int) -> bool:
        return self.devices[s].done(kind, chunk) < self.micro_batches

    def warm_up(self) -> None:
        last = len(self.devices) - 1
        for s in range(last + 1):
            self.put(s, "F", 0)
        for s in range(last, -1, -1):
            device, gradient = self.devices[s], self.arrival(s, "F", 1) or 0.0
            # As many more forwards as end before the first forward of chunk 1 comes back, and as memory allows.
            while (
                device.held + 2 + 2 * s <= self.cap
                and device.now + device.cost["F"][0] <= gradient
                and all(self.left(j, "F", 0) for j in range(s + 1))
            ):
                for j in range(s + 1):
                    self.put(j, "F", 0)
            self.put(s, "F", 1)
        chunk = 0
        for s in range(1, last + 1):
            blocked = 0
            while blocked < 2 and self.must_catch_up(self.devices[s], self.devices[s - 1]):
                blocked += 1
                for j in range(last, s - 1, -1):
                    if self.left(j, "F", chunk) and self.planned(j, "F", chunk):
                        self.put(j, "F", chunk)
                        blocked = 0
                chunk = 1 - chunk

    def must_catch_up(self, device: _Device, above: _Device) -> bool:
        """Chunk 1 of a device feeds the device above, and must be a micro-batch ahead of it."""
        fewer = device.done("F", 0) + device.done("F", 1) < above.done("F", 0) + above.done("F", 1)
        return fewer or device.done("F", 1) <= above.done("F", 1) < self.micro_batches

    def backwards(self) -> None:
        """One input gradient per device: those of chunk 0 from the last device up, then those of chunk 1 down."""
        chunks = [self.backward_chunk(s) for s in range(len(self.devices))]
        up = [(s, 0) for s in range(len(chunks) - 1, -1, -1) if chunks[s] == 0]
        down = [(s, 1) for s in range(len(chunks)) if chunks[s] == 1]
        for s, chunk in up + down:
            self.fill_gap(s, "B", chunk, always=chunk == 0 or self.fill_before_backward)
            self.put(s, "B", chunk)

    def backward_chunk(self, s: int) -> int:
        device = self.devices[s]
        if device.done("B", 0) >= device.done("B", 1):
            return 1
        return 0 if self.planned(s, "B", 0) or not self.left(s, "B", 1) else 1

    def forward(self, s: int) -> None:
        """At most one forward: of chunk 1 if its input is planned, otherwise of chunk 0."""
        device = self.devices[s]
        if not self.left(s, "F", 1):
            return
        if device.done("F", 1) < device.done("F", 0) and self.planned(s, "F", 1):
            chunk = 1
        elif self.left(s, "F", 0) and self.planned(s, "F", 0):
            chunk = 0
        else:
            return
        while device.held + 1 > self.cap and device.weights:
            self.put_weight(s)
        self.fill_gap(s, "F", chunk, always=self.fill_before_forward)
        self.put(s, "F", chunk)

    def fill_gap(self, s: int, kind: str, chunk: int, always: bool) -> None:
        """Weight gradients while they fit; then one that overshoots, if the gap is more than this device can afford."""
        device, until = self.devices[s], self.arrival(s, kind, chunk)
        if until is None:
            return
        while device.weights and device.now + device.cost["W"][device.weights[0]] <= until:
            self.put_weight(s)
        affordable = max(self.most_idle, self.most_before - device.idle_before) - device.idle
        if device.weights and always and until - device.now > affordable:
            self.put_weight(s)


def zb_v_for(stages: int, micro_batches: int, times: StageTimes, comm: float) -> Table:
    """The hand-made ZB-V, or a greedy one if that has a shorter ``max_span`` at these times; 1F1B's memory at most."""
    best = zb_v(stages, micro_batches)
    shortest = longest_span(best, times, comm)
    work = micro_batches * max(sum(map(sum, grids)) for grids in zip(*times.grids(stages, 2), strict=True))
    if shortest <= work * (1 + 1e-9):
        return best
    for planned, table in sorted(_attempts(stages, micro_batches, times, comm), key=lambda attempt: attempt[0]):
        if planned >= shortest:
            break
        try:
            span = longest_span(table, times, comm)
        except ScheduleError:  # the greedy attempts are not made for every number of micro-batches
            continue
        if span < shortest and all(_peak(row) <= 2 * stages for row in table.rows):
            best, shortest = table, span
    return best


def _peak(row: tuple[Step, ...]) -> int:
    return max(itertools.accumulate({"F": 1, "B": 0, "W": -1}[step.kind] for step in row))


def _attempts(stages: int, micro_batches: int, times: StageTimes, comm: float) -> Iterator[tuple[float, Table]]:
    """Tables with the ``max_span`` that they were planned with."""
    f, b, w = times.grids(stages, 2)
    for before_forward, before_backward in itertools.product((True, False), repeat=2):
        idle, most = [-1.0] * stages, float("inf")
        while True:  # again, knowing how long each device was idle, as long as that helps
            devices = [_Device({"F": f[s], "B": b[s], "W": w[s]}, idle[s]) for s in range(stages)]
            builder = _Builder(devices, micro_batches, comm, (before_forward, before_backward))
            builder.build()
            if builder.most_idle >= most:
                break
            span = max(device.now - (device.ends["F", 0][0] - f[s][0]) for s, device in enumerate(devices))
            yield span, Table("zb-v", stages, micro_batches, 2, "v", tuple(tuple(d.steps) for d in devices))
            idle, most = [device.idle for device in devices], builder.most_idle
