"""ZB-1p and ZB-2p: a greedy list schedule under a cap on activations (arXiv 2401.10241, section 3).

The schedule grows in rounds. The first sends micro-batch 0 down the pipeline, lets every device add forwards while it
waits, and brings the gradient back. Each later round i places at most one more forward per device, going down, and the
input gradient of micro-batch i, coming up. Weight gradients fill gaps, or make room when the cap is reached.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.parallel.schedules.table import ScheduleError, Step, Table
from lockstep.parallel.schedules.times import StageTimes

SLACK = 1e-9  # relative: sums of M_B and M_W must not miss the cap by a rounding error


class Choice(NamedTuple):
    """The three booleans of the method; all eight settings are tried and the shortest schedule is kept."""

    wait_for_first_gradient: bool  # leave a gap before the first B rather than start a forward that would delay it
    prefer_backward: bool  # skip a forward when the next device will be ready for its own next B first
    fill_small_gaps: bool  # put a W into a gap even if this device may still afford the gap


class _CapTooSmall(Exception):
    """A forward does not fit even after every weight gradient that could be done."""


@dataclass
class _Device:
    f: float
    b: float
    w: float
    cap: float
    kinds: list[str] = field(default_factory=list)  # of its steps so far; each kind takes the micro-batches in order
    ends: dict[str, list[float]] = field(default_factory=lambda: {"F": [], "B": [], "W": []})
    now: float = 0.0
    held: float = 0.0
    idle: float = 0.0  # since the first forward

    def done(self, kind: str) -> int:
        return len(self.ends[kind])

    @property
    def weights_pending(self) -> bool:
        return len(self.ends["W"]) < len(self.ends["B"])

    def row(self) -> tuple[Step, ...]:
        numbers = {kind: itertools.count() for kind in "FBW"}
        return tuple(Step(kind, next(numbers[kind])) for kind in self.kinds)


class _Builder:
    def __init__(self, devices: list[_Device], micro_batches: int, comm: float, m_w: float, choice: Choice) -> None:
        self.devices, self.micro_batches, self.comm, self.m_w, self.choice = devices, micro_batches, comm, m_w, choice
        self.took = [{"F": device.f, "B": device.b, "W": device.w} for device in devices]
        self.change = {"F": 1.0, "B": m_w - 1.0, "W": -m_w}
        self.most_idle = 0.0
        self.mattered = Choice(*(not yes for yes in choice))  # of a boolean that is True, whether it changed anything

    def build(self) -> None:
        self.first_round()
        for micro_batch in range(1, self.micro_batches):
            self.forwards()
            self.backwards(micro_batch)
        for s, device in enumerate(self.devices):
            while device.weights_pending:
                self.put(s, "W")

    def put(self, s: int, kind: str) -> None:
        """Appends the next step of a kind to device ``s``, as early as its input allows."""
        device = self.devices[s]
        ends = device.ends[kind]
        start = device.now if kind == "W" else max(device.now, self.arrival(s, kind, len(ends)))
        if start > device.now and device.kinds:
            device.idle += start - device.now
            self.most_idle = max(self.most_idle, device.idle)
        device.now = start + self.took[s][kind]
        device.held += self.change[kind]
        ends.append(device.now)
        device.kinds.append(kind)

    def arrival(self, s: int, kind: str, micro_batch: int) -> float:
        """When the input of a step comes in from the neighbour."""
        source = s - 1 if kind == "F" else s + 1
        if not 0 <= source < len(self.devices):
            return 0.0
        return self.devices[source].ends[kind][micro_batch] + self.comm

    def first_round(self) -> None:
        last = len(self.devices) - 1
        for s in range(last + 1):
            self.put(s, "F")
        extra = [0] * (last + 1)
        gradient = self.devices[last].now + self.devices[last].b  # when the device below has done its first B
        for s in range(last - 1, -1, -1):
            extra[s], free = self.warm_up(self.devices[s], gradient + self.comm)
            gradient = max(free, gradient + self.comm) + self.devices[s].b
        for s in range(1, last + 1):  # a device must not run ahead of the one that feeds it
            fed_by_all = extra[s - 1] + 1 == self.micro_batches
            extra[s] = max(0, min(extra[s], extra[s - 1] - (not fed_by_all)))
        for s in range(last + 1):
            for _ in range(extra[s]):
                self.put(s, "F")
        for s in range(last, -1, -1):
            self.put(s, "B")

    def warm_up(self, device: _Device, gradient: float) -> tuple[int, float]:
        """How many forwards fit before the first gradient comes in, and when they would end."""
        count, free, held = 0, device.now, device.held
        while 1 + count < self.micro_batches and held + 1 <= device.cap * (1 + SLACK):
            if free >= gradient:
                break
            if self.choice.wait_for_first_gradient and free + device.f > gradient:
                self.mattered = self.mattered._replace(wait_for_first_gradient=True)
                break
            count, free, held = count + 1, free + device.f, held + 1
        return count, free

    def forwards(self) -> None:
        """At most one forward on every device; if a device does none, neither do those that feed it."""
        wanted = [self.wants_forward(s) for s in range(len(self.devices))]
        for s in range(len(self.devices)):
            if not all(wanted[s:]):
                continue
            self.make_room(s)
            if s > 0:
                self.fill_gap(s, self.arrival(s, "F", self.devices[s].done("F")))
            self.put(s, "F")

    def wants_forward(self, s: int) -> bool:
        device = self.devices[s]
        if device.done("F") >= self.micro_batches:
            return False
        below = self.devices[s + 1] if s + 1 < len(self.devices) else None
        if not self.choice.prefer_backward or below is None or device.done("F") < below.done("F") + 2:
            return True
        gradient = below.now + below.f + below.b + self.comm  # earliest arrival of the next gradient
        if device.now < gradient:
            if device.now + device.f + self.room_weights(device) * device.w <= gradient:
                return True
            if gradient - device.now > self.most_idle - device.idle:
                return True
        self.mattered = self.mattered._replace(prefer_backward=True)
        return False

    def room_weights(self, device: _Device) -> int:
        """How many pending weight gradients must be done before another forward fits."""
        count, held = 0, device.held + 1
        while held > device.cap * (1 + SLACK) and device.done("W") + count < device.done("B"):
            count, held = count + 1, held - self.m_w
        return count

    def make_room(self, s: int) -> None:
        device = self.devices[s]
        while device.held + 1 > device.cap * (1 + SLACK):
            if not device.weights_pending:
                raise _CapTooSmall
            self.put(s, "W")

    def backwards(self, micro_batch: int) -> None:
        for s in range(len(self.devices) - 1, -1, -1):
            device = self.devices[s]
            if s + 1 < len(self.devices):
                self.fill_gap(s, self.arrival(s, "B", micro_batch))
            if s == 0 and device.done("F") == self.micro_batches:  # nothing waits for device 0 any more
                while device.weights_pending:
                    self.put(s, "W")
            self.put(s, "B")

    def fill_gap(self, s: int, until: float) -> None:
        """Weight gradients while they fit; then one that overshoots, unless the device may afford the gap."""
        device = self.devices[s]
        while device.weights_pending and device.now + device.w <= until:
            self.put(s, "W")
        gap = until - device.now
        if device.weights_pending and gap > 0:
            if gap <= self.most_idle - device.idle:
                self.mattered = self.mattered._replace(fill_small_gaps=True)
                if not self.choice.fill_small_gaps:
                    return
            self.put(s, "W")


def greedy(
    name: str, stages: int, micro_batches: int, times: StageTimes, comm: float, cap: Sequence[float], m_w: float
) -> Table:
    """The best of the eight settings by the longest span of a device.

    ``cap``: for every device, the most activations it may hold, in micro-batches of a whole stage. ``m_w``: the part
    of a micro-batch's activations that stays between B and W.
    """
    f, b, w = (tuple(row[0] for row in rows) for rows in times.grids(stages, 1))
    best: tuple[float, list[_Device]] | None = None
    tried: list[tuple[Choice, Choice]] = []
    for setting in itertools.product((True, False), repeat=3):
        if any(_same(setting, other, mattered) for other, mattered in tried):
            continue
        devices = [_Device(f[s], b[s], w[s], cap[s]) for s in range(stages)]
        builder = _Builder(devices, micro_batches, comm, m_w, Choice(*setting))
        try:
            builder.build()
        except _CapTooSmall:
            continue
        finally:
            tried.append((builder.choice, builder.mattered))
        # From the end of its first forward on, plus that forward, for it starts as soon as it can.
        span = max(d.now - d.ends["F"][0] + d.f for d in devices)
        if best is None or span < best[0]:
            best = span, devices
    if best is None:
        raise ScheduleError(
            f"{name}: activation_cap {min(cap):g} is too small; a device must hold at least one micro-batch of "
            f"activations. Give a cap of at least 1, better {stages}."
        )
    return Table(name, stages, micro_batches, 1, "loop", tuple(device.row() for device in best[1]))


def _same(setting: tuple[bool, ...], other: Choice, mattered: Choice) -> bool:
    """Whether a setting differs from one that was tried only where that made no difference."""
    return all(a == b for a, b, counts in zip(setting, other, mattered, strict=True) if counts)
