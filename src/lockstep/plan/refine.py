"""The finalists of a search: uneven layers per stage, and the bubble from the event simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from lockstep.parallel.schedules import StageTimes, Table, schedule
from lockstep.parallel.schedules.timing import makespan
from lockstep.plan.columns import Columns
from lockstep.plan.layout import SCHEDULES, TWO_CHUNKS, Layout
from lockstep.plan.steptime import StepTime

_STEADY = 3
"""After this many rounds of micro-batches per stage a schedule repeats: more are extrapolated."""
_WEIGHT = {"zb-1p": 12.0, "zb-2p": 12.0, "zb-v": 12.0, "v-half": 12.0, "v-min": 12.0, "dualpipe-v": 2.0}
"""Cost of making a table, per step, against the classic schedules."""

TableKey = tuple[str, int, int, int]
"""A schedule's name, stages, micro-batches, chunks."""


def uneven(layout: Layout, layers: int, head_layers: float) -> list[Layout]:
    """The layout and its variants with fewer layers on the last stage, which also has the head.

    ``head_layers``: the head's time in layers. Only for one chunk per device, where stages can be cut anywhere.
    """
    if layout.pp == 1 or layout.chunks > 1 or layout.layers_per_stage:
        return [layout]
    found = [layout]
    even = -(-layers // layout.pp)
    for last in {max(1, even - round(head_layers)), max(1, even - int(head_layers) - 1), max(1, even - 1)}:
        base, more = divmod(layers - last, layout.pp - 1)
        if base < 1:
            continue
        # The fuller stages stand at the end of the row: the first stages hold the most micro-batches.
        cut = [base] * (layout.pp - 1 - more) + [base + 1] * more + [last]
        found.append(replace(layout, layers_per_stage=tuple(cut)))
    return found


def simulation_cost(rows: Columns, row: int, made: set[TableKey]) -> float:
    """Steps to simulate, in steps of a classic schedule. made: tables that are there already, which cost nothing to
    make."""
    weight = 1.0 if (key := table_key(rows, row)) in made else _WEIGHT.get(key[0], 1.0)
    _, stages, micro_batches, chunks = key
    return float(stages * micro_batches * chunks) * 3 * weight


def table_key(rows: Columns, row: int) -> TableKey:
    """What `table_of` takes for the simulation of a row."""
    name = SCHEDULES[int(rows.schedule[row])]
    return name, int(rows.pp[row]), simulated_micro_batches(rows, row), int(rows.chunks[row])


def simulated_bubble(rows: Columns, times: StepTime, row: int, layout: Layout) -> float:
    """Seconds of bubble and head imbalance beyond the slowest stage's own work, from the event simulator."""
    m, used = int(rows.micro_batches[row]), simulated_micro_batches(rows, row)
    name, chunks = SCHEDULES[int(rows.schedule[row])], int(rows.chunks[row])
    stages = stage_times(rows, times, [row] * layout.pp, layout)
    table = table_of(name, layout.pp, used, chunks)
    # Transfers are counted in the closed form's pp part; only the order of the work is simulated here.
    span = makespan(table, stages)
    f, b, w = stages.grids(layout.pp, chunks)
    busiest = max(sum(f[i]) + sum(b[i]) + sum(w[i]) for i in range(layout.pp))
    return max(0.0, span + (m - used) * busiest - m * float(times.slowest[row]))


def simulated_micro_batches(rows: Columns, row: int) -> int:
    """Micro-batches that are simulated: a whole number of rounds."""
    m, p = int(rows.micro_batches[row]), int(rows.pp[row])
    return m if m <= _STEADY * p else _STEADY * p + m % p


@lru_cache(maxsize=256)
def table_of(name: str, stages: int, micro_batches: int, chunks: int) -> Table:
    return schedule(name, stages, micro_batches, chunks=chunks)


def stage_times(rows: Columns, times: StepTime, of: Sequence[int], layout: Layout) -> StageTimes:
    """Times per device and chunk, the head where the last layers are. ``of``: each device's row."""
    p, v = layout.pp, layout.chunks
    layers = layers_of_chunks(layout, int(rows.layers[0]))
    unit = float(rows.layers[0]) / p
    parts = [getattr(times, name) / unit for name in ("forward", "input_gradient", "weight_gradient")]
    cells = [[[float(part[row]) * n for n in chunks] for row, chunks in zip(of, layers, strict=True)] for part in parts]
    device = head_device(layout)
    chunk = next(c for c in range(v) if _group(layout, device, c) == p * v - 1)
    for grid in cells:
        grid[device][chunk] += float(times.head[of[device]]) / 3
    return StageTimes(cells[0], cells[1], cells[2])


def layers_of_chunks(layout: Layout, layers: int) -> list[list[int]]:
    """``[device][chunk]``: layers of every chunk; as even as it goes unless the layout says."""
    if layout.layers_per_stage:  # a device's layers over its chunks alike, as the runtime cuts them
        shares = (divmod(share, layout.chunks) for share in layout.layers_per_stage)
        return [[short + (c < longer) for c in range(layout.chunks)] for short, longer in shares]
    groups = _spread(layers, layout.pp * layout.chunks)
    return [[groups[_group(layout, d, c)] for c in range(layout.chunks)] for d in range(layout.pp)]


def head_device(layout: Layout) -> int:
    """The stage that has the last layers, and so the head."""
    return 0 if layout.schedule in TWO_CHUNKS else layout.pp - 1


def _group(layout: Layout, device: int, chunk: int) -> int:
    """Which group of layers a chunk holds: in V placement, or round after round."""
    if layout.schedule in TWO_CHUNKS:
        return device if chunk == 0 else 2 * layout.pp - 1 - device
    return chunk * layout.pp + device


def _spread(layers: int, groups: int) -> list[int]:
    """As even as it goes, the last group (which has the head) among the shorter."""
    base, more = divmod(layers, groups)
    return [base + (i < more) for i in range(groups)]
