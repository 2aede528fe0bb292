"""When the steps of a table end, for given times: the longest path through its steps."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

from lockstep.parallel.schedules.program import Program
from lockstep.parallel.schedules.table import Table
from lockstep.parallel.schedules.times import StageTimes, grid

Communication = float | Sequence[Sequence[float]]


def longest_span(table: Table, times: StageTimes, comm: Communication = 0.0) -> float:
    """The longest time between a device's first start and its last end (``max_span``)."""
    took = durations(table, times)
    end = end_times(table.program, took, latencies(table, comm))
    return max(end[row[-1]] - (end[row[0]] - took[row[0]]) for row in table.program.rows)


def makespan(table: Table, times: StageTimes, comm: Communication = 0.0) -> float:
    """From the first start, which is at 0, to the last end over all devices."""
    return max(end_times(table.program, durations(table, times), latencies(table, comm)))


def end_times(program: Program, took: Sequence[float], lag: Sequence[Sequence[float]]) -> list[float]:
    """The end of every node when each starts as soon as its device and its inputs allow.

    ``took``: the duration of every node; ``lag``: the latency of a message, ``[from device][to device]``.
    """
    end = [0.0] * (len(program.nodes) + 1)  # the last entry, at index -1, stands for "nothing before"
    for number, (device, _, before, inputs) in enumerate(program.nodes):
        at = end[before]
        for source, sender in inputs:
            arrival = end[source] + lag[sender][device]
            if arrival > at:
                at = arrival
        end[number] = at + took[number]
    return end[:-1]


def durations(table: Table, times: StageTimes) -> list[float]:
    """The duration of every node of the table's program."""
    f, b, w = times.grids(table.stages, table.chunks)
    both = [[x + y for x, y in zip(xs, ys, strict=True)] for xs, ys in zip(b, w, strict=True)]
    kinds = {"F": f, "B": b, "W": w, "BW": both}
    took = []
    for device, step, _, _ in table.program.nodes:
        alone = kinds[step.kind][device][step.chunk]
        partner = step.partner
        took.append(alone if partner is None else times.overlapped * (alone + both[device][partner.chunk]))
    return took


def latencies(table: Table, comm: Communication) -> list[list[float]]:
    """The latency of a message, ``[from device][to device]``."""
    found = grid(comm, table.stages, table.stages, "comm")
    if isinstance(comm, Real):  # nothing is paid inside a device
        return [[0.0 if a == b else lag for b, lag in enumerate(row)] for a, row in enumerate(found)]
    return found
