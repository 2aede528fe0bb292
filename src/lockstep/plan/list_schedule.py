"""List scheduling: always the step that can start first, by a rule of preference, under a cap on activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.parallel.schedules import StageTimes, Step, Table
from lockstep.parallel.schedules.timing import Communication, latencies

SLACK = 1e-9  # relative: sums of activations must not miss the cap by a rounding error


class Rule(NamedTuple):
    """``ahead``: how many micro-batches more than 1F1B a device may have in flight (the cap holds in any case).
    ``forward_first``: of a forward and a backward that are both ready, the forward, while that is allowed.
    ``patience``: a weight gradient may delay a step that is under way to this device by this part of its duration.
    """

    ahead: int
    forward_first: bool
    patience: float


class Shape(NamedTuple):
    """What is scheduled: devices, micro-batches, chunks and their placement, times, latencies and memory."""

    stages: int
    micro_batches: int
    chunks: int
    placement: str
    times: StageTimes
    comm: Communication
    cap: Sequence[float]  # micro-batches of a whole device, per device
    m_w: float  # the part of a micro-batch's activations that stays between B and W

    def table(self, rows: Sequence[Sequence[Step]]) -> Table:
        """The searched table with these rows."""
        return Table(
            "searched", self.stages, self.micro_batches, self.chunks, self.placement, tuple(tuple(r) for r in rows)
        )


class _Choice(NamedTuple):
    start: float
    step: Step


class _Lists:
    """The state of the devices while steps are placed one by one, in the order of their starts."""

    def __init__(self, shape: Shape, rule: Rule) -> None:
        self.shape, self.rule = shape, rule
        self.frame = shape.table([()] * shape.stages)
        f, b, w = shape.times.grids(shape.stages, shape.chunks)
        self.took, self.lag = {"F": f, "B": b, "W": w}, latencies(self.frame, shape.comm)
        self.rows: list[list[Step]] = [[] for _ in range(shape.stages)]
        self.now = [0.0] * shape.stages
        self.held = [0.0] * shape.stages
        self.count = [{(kind, c): 0 for kind in "FB" for c in range(shape.chunks)} for _ in range(shape.stages)]
        self.weights: list[list[Step]] = [[] for _ in range(shape.stages)]
        self.ends: dict[tuple[str, int, int], float] = {}  # of F and B, by micro-batch and group

    def place(self, device: int, choice: _Choice) -> None:
        kind, number, chunk, _ = choice.step
        end = self.now[device] = choice.start + self.took[kind][device][chunk]
        share, late = 1 / self.shape.chunks, self.shape.m_w / self.shape.chunks
        self.held[device] += {"F": share, "B": late - share, "W": -late}[kind]
        self.rows[device].append(choice.step)
        if kind == "W":
            self.weights[device].remove(choice.step)
        else:
            self.count[device][kind, chunk] += 1
            self.ends[kind, number, self.frame.group(device, chunk)] = end
        if kind == "B":
            self.weights[device].append(choice.step._replace(kind="W"))

    def input_of(self, device: int, kind: str, chunk: int) -> float | None:
        """When the next such step has its input; None if that is not known yet, or no such step is left."""
        number, group = self.count[device][kind, chunk], self.frame.group(device, chunk)
        if number == self.shape.micro_batches:
            return None
        if kind == "F":
            source = ("F", number, group - 1) if group > 0 else None
        elif group == self.frame.groups - 1:
            source = ("F", number, group)
        elif number >= self.count[device]["F", chunk]:
            return None
        else:
            source = ("B", number, group + 1)
        if source is None:
            return 0.0
        end = self.ends.get(source)
        return None if end is None else end + self.lag[self.frame.holder(source[2])[0]][device]

    def allowed(self, device: int, chunk: int) -> bool:
        """Whether a forward fits: under the cap, and not too many in flight. Later chunks always may go ahead."""
        fits = self.held[device] + 1 / self.shape.chunks <= self.shape.cap[device] * (1 + SLACK)
        count = self.count[device]
        in_flight = sum(count["F", c] - count["B", c] for c in range(self.shape.chunks)) / self.shape.chunks
        limit = max(1, self.shape.stages - device + self.rule.ahead)
        return fits and (chunk > 0 or in_flight < limit)

    def choose(self, device: int) -> _Choice | None:
        """What the device would do next; None if it can only wait for something not yet known."""
        coming: list[tuple[float, int, Step]] = []
        for (kind, chunk), number in self.count[device].items():
            ready = self.input_of(device, kind, chunk)
            if ready is not None and (kind == "B" or self.allowed(device, chunk)):
                # Among equals, what is nearer to the end of its micro-batch.
                rank = (0 if self.rule.forward_first == (kind == "F") else 2) + (chunk if kind == "B" else -chunk)
                coming.append((max(ready, self.now[device]), rank, Step(kind, number, chunk)))
        weights, now = self.weights[device], self.now[device]
        if not coming:
            return _Choice(now, weights[0]) if weights else None
        start, _, step = min(coming)
        if weights and start > now:
            took = self.took["W"][device][weights[0].chunk]
            full = self.held[device] + 1 / self.shape.chunks > self.shape.cap[device] * (1 + SLACK)
            if full or now + took <= start + self.rule.patience * took:
                return _Choice(now, weights[0])
        return _Choice(start, step)


def list_schedule(shape: Shape, rule: Rule) -> Table | None:
    """A table by one rule; None if the rule leads into a dead end, which can happen with chunks and a small cap."""
    lists = _Lists(shape, rule)
    total = 3 * shape.stages * shape.chunks * shape.micro_batches
    choices = [lists.choose(device) for device in range(shape.stages)]
    for _ in range(total):
        known = [(choice.start, device) for device, choice in enumerate(choices) if choice is not None]
        if not known:
            return None
        _, device = min(known)
        choice = choices[device]
        assert choice is not None
        lists.place(device, choice)
        # Only this device and the holders of neighbouring groups can have got something new to choose from.
        for other in {device, (device - 1) % shape.stages, (device + 1) % shape.stages}:
            choices[other] = lists.choose(other)
    return shape.table(lists.rows)
