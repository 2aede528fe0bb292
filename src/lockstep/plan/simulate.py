"""The event simulator of pipeline tables: when every step starts and ends, and what is held in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.given import instance
from lockstep.parallel.schedules.table import ScheduleError, Step, Table
from lockstep.parallel.schedules.times import PerStage, StageTimes, grid
from lockstep.parallel.schedules.timing import Communication, durations, end_times, latencies


class Event(NamedTuple):
    """A step with its times."""

    device: int
    step: Step
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What happens when a table runs. Times are in the unit of the given times, memory in the unit of ``m_b``.

    ``start``, ``end``: for every device, the times of its steps, in the order of the table's rows.
    ``held``: for every device, the activations held while each step runs.
    """

    table: Table
    start: tuple[NDArray[np.float64], ...]
    end: tuple[NDArray[np.float64], ...]
    held: tuple[NDArray[np.float64], ...]

    @cached_property
    def makespan(self) -> float:
        """First start to last end over all devices."""
        return max(float(e[-1]) for e in self.end) - min(float(s[0]) for s in self.start)

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """For every device, the time between its first start and its last end."""
        return tuple(float(e[-1] - s[0]) for s, e in zip(self.start, self.end, strict=True))

    @property
    def max_span(self) -> float:
        """The longest of ``spans``: the cost of the zero-bubble papers (arXiv 2401.10241)."""
        return max(self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For every device, the time it computes."""
        return tuple(float((e - s).sum()) for s, e in zip(self.start, self.end, strict=True))

    @property
    def ideal(self) -> float:
        """No schedule is shorter than the work of the busiest device; with equal stages, m (F + B + W)."""
        return max(self.busy)

    @property
    def bubble(self) -> float:
        """``max_span - ideal``."""
        return self.max_span - self.ideal

    @property
    def bubble_rate(self) -> float:
        """``(max_span - ideal) / max_span``."""
        return self.bubble / self.max_span if self.max_span else 0.0

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """For every device, the most activations it holds at any moment."""
        return tuple(float(h.max()) for h in self.held)

    @property
    def peak_activation(self) -> float:
        """The largest of ``peaks``. With the default ``m_b`` the unit is one micro-batch of a whole device."""
        return max(self.peaks)

    @cached_property
    def events(self) -> list[Event]:
        """Every step of every device with its times, ordered by start."""
        rows = zip(self.table.rows, self.start, self.end, strict=True)
        found = [
            Event(device, step, float(start), float(end))
            for device, (row, starts, ends) in enumerate(rows)
            for step, start, end in zip(row, starts, ends, strict=True)
        ]
        return sorted(found, key=lambda event: (event.start, event.device))


def simulate(
    table: Table, times: StageTimes, comm: Communication = 0.0, m_b: PerStage = 1.0, m_w: PerStage | None = None
) -> Simulation:
    """Runs a table. Raises :class:`ScheduleError` if it cannot run.

    ``comm``: latency of a message between two devices, a number or ``[from][to]``; asynchronous, without
    contention, it occupies neither side; nothing is paid inside a device.
    ``m_b``, ``m_w``: a forward adds ``m_b``; B turns it into ``m_w`` (None: all of ``m_b``, so that W frees
    everything); W frees that. A number counts a whole device, of which each chunk holds its share;
    ``[device][chunk]`` is of the chunk.
    """
    instance(table, Table, "simulate: table", error=ScheduleError)
    instance(times, StageTimes, "simulate: times", error=ScheduleError)
    took = durations(table, times)
    ends, lengths = np.array(end_times(table.program, took, latencies(table, comm))), np.array(took)
    rows = [np.array(row) for row in table.program.rows]
    return Simulation(
        table,
        tuple((ends - lengths)[row] for row in rows),
        tuple(ends[row] for row in rows),
        tuple(held(table, device, m_b, m_w) for device in range(table.stages)),
    )


def held(table: Table, device: int, m_b: PerStage = 1.0, m_w: PerStage | None = None) -> NDArray[np.float64]:
    """Activations that ``device`` holds while each of its steps runs."""
    full = _memory(table, m_b, "m_b")[device]
    return held_by_chunks(table, device, full, full if m_w is None else _memory(table, m_w, "m_w")[device])


def held_by_chunks(table: Table, device: int, full: list[float], late: list[float]) -> NDArray[np.float64]:
    """The same of one device, of each chunk of which a forward adds ``full`` and B leaves ``late``."""
    added, freed = [], []
    for step in table.rows[device]:
        added.append(full[step.chunk] if step.kind == "F" else 0.0)
        freed.append(sum(_freed(part, full, late) for part in step.parts))
    return np.cumsum(added) - np.concatenate([[0.0], np.cumsum(freed)[:-1]])


def _freed(step: Step, full: list[float], late: list[float]) -> float:
    if step.kind == "B":
        return full[step.chunk] - late[step.chunk]
    return {"F": 0.0, "W": late[step.chunk], "BW": full[step.chunk]}[step.kind]


def _memory(table: Table, value: PerStage, key: str) -> list[list[float]]:
    share: PerStage = value / table.chunks if isinstance(value, (int, float)) else value
    return grid(share, table.stages, table.chunks, key)
