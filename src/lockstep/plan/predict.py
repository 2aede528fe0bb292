"""One layout on one cluster: predicted step time, memory and their parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.given import number
from lockstep.plan.cluster import Cluster, cluster_of
from lockstep.plan.coefficients import Coefficients, checked
from lockstep.plan.columns import Columns, layout_columns
from lockstep.plan.layout import Batch, Layout, check_layout
from lockstep.plan.memory import PARTS
from lockstep.plan.named_shape import model_shape
from lockstep.plan.per_stage import fullest, stages_step_time, walks
from lockstep.plan.rank_memory import RankMemory
from lockstep.plan.refine import simulated_bubble
from lockstep.plan.shape import ModelShape
from lockstep.plan.steptime import StepTime, step_time

AXES = ("tp", "cp", "ep", "pp", "dp", "offload")


@dataclass(frozen=True)
class Prediction:
    """What a step is predicted to take. Times in seconds, memory in GB (1e9 bytes) of the fullest rank.

    ``parts`` sums to ``step_s``: compute (slowest stage), bubble, exposed communication per axis, optimizer, host.
    ``memory_parts`` sums to ``memory_gb``. ``mfu``: model FLOPs (no recomputation) over the peak rate. ``bubble``:
    fraction of the step. ``simulated``: the bubble is from the event simulator, not from the closed form.
    ``stage_memory_gb``: of a rank of every pipeline stage, at the worst step of its schedule.
    """

    step_s: float
    tokens_s: float
    mfu: float
    bubble: float
    exposed: dict[str, float]
    parts: dict[str, float]
    memory_gb: float
    memory_parts: dict[str, float]
    fits: bool
    simulated: bool = False
    stage_memory_gb: tuple[float, ...] = ()


def predict(
    model: str | Path | Mapping[str, Any] | ModelShape,
    layout: Layout,
    cluster: str | Cluster,
    batch: Batch,
    coefficients: Coefficients | None = None,
    dtype: str = "bf16",
) -> Prediction:
    """Predicted step time and memory of one layout.

    ``model``: a name, config.json, sizes or a shape; ``cluster``: such as ``"64xH100"`` or a ``Cluster``;
    ``coefficients``: from ``calibrate`` (default: as the cluster is described). Raises LockstepError if the layout
    does not suit the model, the batch or the number of devices; one that exceeds the memory has ``fits=False``.
    """
    shape, place, factors = model_shape(model), cluster_of(cluster), checked(coefficients)
    check_layout(layout, shape, batch, place.devices)
    check_dtype(place, dtype)
    return layout_prediction(shape, layout, place, batch, factors, dtype)


def layout_prediction(
    shape: ModelShape, layout: Layout, cluster: Cluster, batch: Batch, factors: Coefficients, dtype: str
) -> Prediction:
    """One layout that suits the model and the cluster: a pipeline simulated, its stages walked through their steps."""
    return with_stages(timed(shape, layout, cluster, batch, factors, dtype), walks(shape, layout, batch), cluster)


def timed(
    shape: ModelShape, layout: Layout, cluster: Cluster, batch: Batch, factors: Coefficients, dtype: str
) -> Prediction:
    """Its time, that of a pipeline from the simulator; memory is left to `with_stages`."""
    rows = layout_columns(shape, [layout], batch)
    if layout.by_stage:
        times = stages_step_time(shape, layout, batch, cluster, factors, dtype)
        return prediction(shape, rows, times, 0, cluster, batch, dtype, float(times.bubble[0]))
    times = step_time(rows, cluster, factors, dtype)
    bubble = simulated_bubble(rows, times, 0, layout) if layout.pp > 1 else None
    return prediction(shape, rows, times, 0, cluster, batch, dtype, bubble)


def check_dtype(cluster: Cluster, dtype: str) -> None:
    """Raise LockstepError if the device has no matrix rate for the dtype."""
    if not isinstance(dtype, str) or dtype not in cluster.device.matrix_tflops:
        known = ", ".join(cluster.device.matrix_tflops)
        raise LockstepError(f"dtype {dtype!r:.60}: {cluster.device.name} is described for {known}; choose one of them.")


def prediction(
    shape: ModelShape,
    rows: Columns,
    times: StepTime,
    row: int,
    cluster: Cluster,
    batch: Batch,
    dtype: str,
    bubble: float | None = None,
) -> Prediction:
    """The time of row ``row`` of evaluated columns; ``bubble``: seconds, from the simulator. Memory is left to
    `with_stages`."""
    simulated = bubble is not None
    idle = float(times.bubble[row]) if bubble is None else bubble
    step = float(times.step[row]) - float(times.bubble[row]) + idle
    exposed = {axis: float(getattr(times, f"exposed_{axis}")[row]) for axis in AXES}
    parts = {
        "compute": float(times.compute[row]),
        "bubble": idle,
        **{axis if axis == "offload" else f"{axis} communication": value for axis, value in exposed.items()},
        "optimizer": float(times.optimizer[row]),
        "host": float(times.host[row]),
    }
    flops = shape.flops_per_token(batch.seq) * batch.tokens
    peak = cluster.devices * cluster.device.matrix_tflops[dtype] * 1e12
    return Prediction(
        step_s=step,
        tokens_s=batch.tokens / step,
        mfu=flops / (step * peak),
        bubble=idle / step,
        exposed=exposed,
        parts=parts,
        memory_gb=0.0,
        memory_parts={},
        fits=False,
        simulated=simulated,
    )


def with_stages(found: Prediction, stages: Iterable[RankMemory], cluster: Cluster) -> Prediction:
    """The prediction with what a rank of every stage takes at its fullest moment."""
    stages = list(stages)
    held = fullest(stages)
    total = float(held.total[0])
    parts = {name: float(getattr(held, name)[0]) / 1e9 for name in PARTS}
    each, fits = tuple(stage.peak / 1e9 for stage in stages), total <= cluster.device.capacity
    return replace(found, memory_gb=total / 1e9, memory_parts=parts, fits=fits, stage_memory_gb=each)


def check_prediction(found: Prediction, what: str) -> None:
    """Raise LockstepError for numbers that no step takes. what: how messages name the prediction."""
    for name in ("step_s", "tokens_s"):
        number(getattr(found, name), f"{what}: {name}", above=True)
    singles = {name: getattr(found, name) for name in ("mfu", "bubble", "memory_gb")}
    nested = {name: getattr(found, name) for name in ("exposed", "parts", "memory_parts")}
    several = {f"{name}.{part}": value for name, values in nested.items() for part, value in values.items()}
    each = {f"stage_memory_gb.{i}": value for i, value in enumerate(found.stage_memory_gb)}
    for name, value in (singles | several | each).items():
        number(value, f"{what}: {name}")
