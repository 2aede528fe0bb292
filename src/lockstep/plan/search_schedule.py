"""A table for stages that take unequal times, under a memory cap: the best of many rules, then polished."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence

from lockstep.given import instance, number, whole
from lockstep.parallel.schedules import NAMES, ScheduleError, StageTimes, Step, Table, schedule
from lockstep.parallel.schedules.named import check_size, per_device
from lockstep.parallel.schedules.timing import Communication
from lockstep.plan.list_schedule import SLACK, Rule, Shape, list_schedule
from lockstep.plan.schedule_program import best_table
from lockstep.plan.simulate import Simulation, simulate

SMALL = 40  # steps, up to which the integer program is worth its time


def search_schedule(
    stages: int,
    micro_batches: int,
    times: StageTimes,
    comm: Communication = 0.0,
    activation_cap: float | Sequence[float] | None = None,
    m_w: float = 1.0,
    chunks: int = 1,
    metric: str = "max_span",
    seconds: float = 10.0,
) -> Table:
    """The best table found, named ``searched`` unless a named schedule is best.

    ``activation_cap``: what a device may hold, in micro-batches of a whole device, or one number per device (p unless
    given); B turns a micro-batch's activations into ``m_w`` of them, W frees the rest. ``chunks``: 1, or 2 in the V
    placement. ``metric``: ``max_span`` or ``makespan``. ``seconds``: for polishing; 0 polishes nothing.
    Raises :class:`ScheduleError` if nothing fits the cap.
    """
    shape = _shape(stages, micro_batches, times, comm, activation_cap, m_w, chunks)
    if metric not in ("max_span", "makespan"):
        raise ScheduleError(f"metric {metric!r} is unknown; use max_span or makespan.")
    number(seconds, "search_schedule: seconds", error=ScheduleError)

    def cost(run: Simulation) -> float:
        return run.max_span if metric == "max_span" else run.makespan

    best: tuple[float, Table] | None = None
    for table in itertools.chain(_named(shape), _listed(shape)):
        if (run := _fitting(shape, table)) is not None and (best is None or cost(run) < best[0]):
            best = cost(run), table
    if best is None:
        raise ScheduleError(
            f"no schedule of {stages} devices and {chunks} chunks fits activation_cap {min(shape.cap):g}; a device "
            f"must hold at least one micro-batch. Raise the cap, or recompute or offload so that each counts less."
        )
    return _polished(shape, best, cost, metric, seconds)


def _shape(
    stages: int,
    micro_batches: int,
    times: StageTimes,
    comm: Communication,
    cap: float | Sequence[float] | None,
    m_w: float,
    chunks: int,
) -> Shape:
    if chunks not in (1, 2):
        raise ScheduleError(f"chunks is {chunks!r}; a schedule is searched for 1 chunk, or for 2 in the V placement.")
    stages = whole(stages, "search_schedule: stages", error=ScheduleError)
    micro_batches = whole(micro_batches, "search_schedule: micro_batches", error=ScheduleError)
    check_size("search_schedule", stages, micro_batches, chunks)
    instance(times, StageTimes, "search_schedule: times", error=ScheduleError)
    number(m_w, "search_schedule: m_w", most=1.0, error=ScheduleError)
    caps = per_device(stages if cap is None else cap, stages)
    return Shape(stages, micro_batches, chunks, "v" if chunks == 2 else "loop", times, comm, caps, m_w)


def _fitting(shape: Shape, table: Table) -> Simulation | None:
    """The simulation of a table, if it keeps to the cap."""
    run = simulate(table, shape.times, shape.comm, m_w=shape.m_w)
    return run if all(p <= cap * (1 + SLACK) for p, cap in zip(run.peaks, shape.cap, strict=True)) else None


def _named(shape: Shape) -> Iterator[Table]:
    """The named schedules of this shape, as far as they can be made."""
    one_latency = shape.comm if isinstance(shape.comm, (int, float)) else 0.0
    for name in NAMES:
        greedy = name in ("zb-1p", "zb-2p")
        cap = shape.cap if greedy else None
        try:
            table = schedule(name, shape.stages, shape.micro_batches, shape.times, one_latency, None, cap, shape.m_w)
        except ScheduleError:  # times for another number of chunks, or a cap too small for it
            continue
        if (table.chunks, table.placement) == (shape.chunks, shape.placement):
            yield table


def _listed(shape: Shape) -> Iterator[Table]:
    """List schedules by every rule that can make a difference under the cap."""
    most_ahead = min(int(max(shape.cap)), shape.micro_batches)
    for ahead in sorted({-1, 0, 1, 2, most_ahead // 2, most_ahead}):
        for forward_first, patience in itertools.product((False, True), (0.0, 0.5, 1.0)):
            table = list_schedule(shape, Rule(ahead, forward_first, patience))
            if table is not None:
                yield table


def _polished(
    shape: Shape, best: tuple[float, Table], cost: Callable[[Simulation], float], metric: str, seconds: float
) -> Table:
    ideal = simulate(best[1], shape.times, shape.comm).ideal
    small = 3 * shape.stages * shape.chunks * shape.micro_batches <= SMALL
    if seconds <= 0 or best[0] <= ideal * (1 + SLACK):
        return best[1]
    best = _local(shape, best, cost, seconds / 2 if small else seconds)
    if small:
        # Devices start one trip after the other, and none of a better table takes longer than the best span so far.
        horizon = best[0] + simulate(best[1], shape.times, shape.comm).makespan
        table = best_table(shape, best[0], horizon, metric, seconds / 2)
        if table is not None and (run := _fitting(shape, table)) is not None and cost(run) < best[0]:
            return table
    return best[1]


def _local(
    shape: Shape, best: tuple[float, Table], cost: Callable[[Simulation], float], seconds: float
) -> tuple[float, Table]:
    """Moves a step of a device to another place and keeps what is no worse, until time is over or nothing helps."""
    draw = random.Random(0)  # the same search every time, as far as the clock allows
    until, rows = time.monotonic() + seconds, _split(best[1])
    value, failures = best[0], 0
    while time.monotonic() < until and failures < 60 * shape.stages:
        device = draw.randrange(shape.stages)
        row = list(rows[device])
        at = draw.randrange(len(row))
        to = min(max(at + draw.choice((-3, -2, -1, 1, 2, 3)), 0), len(row) - 1)
        row.insert(to, row.pop(at))
        tried = [*rows[:device], row, *rows[device + 1 :]]
        try:
            run = _fitting(shape, shape.table(tried))
        except ScheduleError:  # against a dependency, or a deadlock
            continue
        if run is None or cost(run) > value:
            failures += 1
            continue
        failures = 0 if cost(run) < value else failures + 1
        value, rows = cost(run), tried
    return (value, shape.table(rows)) if value < best[0] else best


def _split(table: Table) -> list[list[Step]]:
    """The rows with every full backward as B and W."""
    return [
        [part._replace(kind=kind) for step in row for part in step.parts for kind in part.kind] for row in table.rows
    ]
