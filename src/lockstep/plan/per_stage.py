"""A layout whose stages recompute or offload each its own number of layers: its time and memory, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from math import gcd

import numpy as np

from lockstep.parallel.schedules.timing import makespan
from lockstep.plan.cluster import Cluster
from lockstep.plan.coefficients import Coefficients
from lockstep.plan.columns import Column, Columns, layout_columns
from lockstep.plan.layout import Batch, Layout
from lockstep.plan.memory import MARGIN, Memory
from lockstep.plan.rank_memory import RankMemory, rank_memory
from lockstep.plan.refine import head_device, layers_of_chunks, simulated_micro_batches, stage_times, table_of
from lockstep.plan.shape import ModelShape
from lockstep.plan.simulate import Simulation, simulate
from lockstep.plan.steptime import StepTime, step_time

_STEADY = 5
"""After this many rounds of micro-batches per stage a pipeline has been as full as it gets."""
_REPEATS = ("1f1b", "interleaved", "zb-h1", "zb-1p", "zb-v", "v-half", "v-min", "dualpipe-v")


def stage_columns(shape: ModelShape, layout: Layout, batch: Batch) -> Columns:
    """One row per stage: the layout as seen from it."""
    rows = layout_columns(shape, [layout], batch).take(np.zeros(layout.pp, dtype=int))
    layers = np.array([float(sum(chunks)) for chunks in layers_of_chunks(layout, shape.layers)])
    again, away = (np.array(counts, dtype=np.float64) for counts in (layout.recomputed, layout.offloaded))
    return replace(rows, slow_layers=layers, last_layers=layers, recompute_layers=again, offload_layers=away)


def stages_step_time(
    shape: ModelShape, layout: Layout, batch: Batch, cluster: Cluster, factors: Coefficients, dtype: str = "bf16"
) -> StepTime:
    """The step, one row: the slowest stage's own work and communication, and the bubble from the event simulator."""
    rows = stage_columns(shape, layout, batch)
    times = step_time(rows, cluster, factors, dtype)
    device, own = head_device(layout), own_seconds(times, layout)
    slow, m = int(np.argmax(own)), float(rows.micro_batches[0])
    found = {field.name: getattr(times, field.name)[slow : slow + 1] for field in fields(StepTime)}
    found["slowest"] = own[slow : slow + 1]
    found["compute"] = found["compute"] - (0.0 if slow == device else m * found["head"])
    for name in ("exposed_dp", "optimizer"):  # at the end of the step all wait for the last
        found[name] = getattr(times, name).max(keepdims=True)
    found["bubble"] = np.array([_bubble(rows, times, layout, float(own[slow]))])
    parts = ("compute", "bubble", "exposed_tp", "exposed_cp", "exposed_ep", "exposed_pp", "exposed_dp")
    found["step"] = sum((found[name] for name in (*parts, "exposed_offload", "optimizer", "host")), np.zeros(1))
    return StepTime(**found)


def own_seconds(times: StepTime, layout: Layout) -> Column:
    """What a micro-batch takes on each stage. times: one row per stage."""
    own: Column = np.where(np.arange(layout.pp) == head_device(layout), times.slowest, times.slowest - times.head)
    return own


def fullest(stages: Sequence[RankMemory]) -> Memory:
    """The fullest of these at its fullest moment, one row."""
    found = max(stages, key=lambda m: m.peak)
    now = found.moments[found.peak_step]
    parts = {
        "weights": found.fixed["weights"],
        "optimizer": found.fixed["optimizer"],
        "gradients": now["gradients"],
        "activations": now.get("activations", 0.0),
        "working": now.get("working", 0.0) + now.get("messages", 0.0) + found.fixed["tokens"],
        "logits": now.get("loss", 0.0),
    }
    held = {"buffers": found.fixed["buffers"], "margin": MARGIN * sum(parts.values())}
    return Memory(**{name: np.array([value]) for name, value in (parts | held).items()})


def stage_memory(shape: ModelShape, layout: Layout, batch: Batch, stage: int, whole: Batch | None = None) -> RankMemory:
    """Of one rank of a stage; its other ranks hold the same. whole: what `batch` is a part of; its tokens are there."""
    found = rank_memory(shape, layout, batch, stage * layout.dp * layout.cp * layout.tp)
    if whole is None:
        return found
    tokens = found.fixed["tokens"] * whole.sequences / batch.sequences
    return replace(found, fixed=found.fixed | {"tokens": tokens})


def walks(shape: ModelShape, layout: Layout, batch: Batch) -> Iterator[RankMemory]:
    """A rank of every stage, one after the other, at every step of its schedule: what a split backward keeps between B
    and W, and when activations meet the sums of gradients, only the walk through the steps knows."""
    short = as_full(layout, batch)
    return (stage_memory(shape, layout, short, stage, batch) for stage in range(layout.pp))


def walks_that_fit(shape: ModelShape, layout: Layout, batch: Batch, room: float) -> list[RankMemory] | None:
    """The same as a list; None where a stage takes more than ``room`` bytes. One that does is mostly at an end of the
    pipeline, or of a row of stages with as many layers: those are looked at first."""
    short, pp = as_full(layout, batch), layout.pp
    layers = [sum(chunks) for chunks in layers_of_chunks(layout, shape.layers)]
    ends = {0, pp - 1} | {s + after for s in range(pp - 1) if layers[s] != layers[s + 1] for after in (0, 1)}
    found: dict[int, RankMemory] = {}
    for stage in sorted(range(pp), key=lambda stage: stage not in ends):
        found[stage] = stage_memory(shape, layout, short, stage, batch)
        if found[stage].peak > room:
            return None
    return [found[stage] for stage in range(pp)]


def as_full(layout: Layout, batch: Batch) -> Batch:
    """A batch with fewer micro-batches in which each stage's memory rises exactly as high as in this one: where a
    replica adds all its gradients into one sum, and the schedule repeats, nothing rises any more once the pipeline was
    full."""
    m, used = layout.micro_batches(batch), _STEADY * layout.pp
    if layout.gradient_groups != layout.dp or layout.schedule not in _REPEATS or m <= used + layout.pp:
        return batch
    return Batch(layout.dp * layout.micro_batch * (used + m % layout.pp), batch.seq)


def plan_simulation(
    shape: ModelShape, layout: Layout, batch: Batch, cluster: Cluster, factors: Coefficients, dtype: str = "bf16"
) -> Simulation:
    """The pipeline of one layout as the simulator runs it: seconds, and GB of a rank of each stage, all that it holds;
    as many micro-batches as it takes to reach the steady state and leave it."""
    if layout.by_stage:
        rows, of = stage_columns(shape, layout, batch), list(range(layout.pp))
    else:
        rows, of = layout_columns(shape, [layout], batch), [0] * layout.pp
    times = step_time(rows, cluster, factors, dtype)
    table = table_of(layout.schedule, layout.pp, simulated_micro_batches(rows, 0), layout.chunks)
    run = simulate(table, stage_times(rows, times, of, layout), float(times.hop[0]))
    drawn = Batch(layout.dp * layout.micro_batch * table.micro_batches, batch.seq)
    # As many canonical groups as so few micro-batches can be cut into alike; gcd(0, n) is n, each on its own.
    layout = replace(layout, gradient_groups=gcd(layout.gradient_groups, drawn.sequences // layout.micro_batch))
    stages = [stage_memory(shape, layout, drawn, stage, batch) for stage in range(layout.pp)]
    held = (np.array([stage.at(step) / 1e9 for step in range(len(stage.steps))]) for stage in stages)
    return replace(run, held=tuple(held))


def _bubble(rows: Columns, times: StepTime, layout: Layout, slowest: float) -> float:
    """Seconds beyond the slowest stage's own work; transfers are counted in the closed form's pp part."""
    m, used = int(rows.micro_batches[0]), simulated_micro_batches(rows, 0)
    stages = stage_times(rows, times, range(layout.pp), layout)
    span = makespan(table_of(layout.schedule, layout.pp, used, layout.chunks), stages)
    busy = [sum(sum(part) for part in parts) for parts in zip(*stages.grids(layout.pp, layout.chunks), strict=True)]
    return max(0.0, span + (m - used) * max(busy) - m * slowest)
