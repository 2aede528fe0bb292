"""Calibration: a few measured steps move the coefficients away from the cluster's description, no further than needed.

Maximum a posteriori: 15 physical factors with log-normal priors, and for every measured layer shape one factor on its
layer time, shrunk towards 1. A shape that was not measured is predicted from the factors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import LockstepError
from lockstep.given import instance, number, whole
from lockstep.plan.cluster import Cluster, cluster_of
from lockstep.plan.coefficients import FITTED, Coefficients, from_logs, layer_keys
from lockstep.plan.columns import Column, Columns, join, layout_columns
from lockstep.plan.layout import Batch, Layout, check_layout
from lockstep.plan.named_shape import model_shape
from lockstep.plan.predict import timed
from lockstep.plan.shape import ModelShape, megatron_gpt
from lockstep.plan.steptime import step_time
from lockstep.plan.typed import known_keys, typed
from lockstep.plan.yaml_file import read_yaml

_NOISE = 0.04
"""Relative error of a row that the factors do not explain."""
_LAYER_SPREAD = 0.1
"""Plausible relative error of one layer shape's predicted time (kernel choice, alignment, launch jitter)."""
_FLAT = ("layers", "hidden", "heads", "seq", "tp", "dp", "pp", "micro_batch", "global_batch")
_LONGEST = 1e9
"""Seconds of a step that is one."""
_STEP = 1e-3
_ITERATIONS = 25
_SIMULATIONS = 2
"""How often the factors are fitted: to the simulator's pipelines as described, then as fitted."""


@dataclass(frozen=True)
class Measured:
    """One measured training step, in seconds."""

    model: ModelShape
    layout: Layout
    batch: Batch
    step_s: float


def calibrate(rows: Sequence[Measured | Mapping[str, Any]], cluster: str | Cluster | None = None) -> Coefficients:
    """Coefficients under which the planner reproduces measured steps.

    ``rows``: ``Measured`` values or mappings as ``measured_row`` takes them. ``cluster``: what they ran on
    (default: A100-80). Raises LockstepError without rows or for a time that is not positive.
    """
    if isinstance(rows, (str, Mapping)) or not isinstance(rows, Iterable):
        raise LockstepError(f"calibrate: rows is {rows!r:.60}; give a list of measured steps.")
    measured = [row if isinstance(row, Measured) else measured_row(row, f"row {i}") for i, row in enumerate(rows)]
    if not measured:
        raise LockstepError("calibrate: no measured steps given: it needs at least one row with step_s.")
    for i, row in enumerate(measured):
        _check(row, f"calibrate: row {i}")
    place = cluster_of("8xA100-80" if cluster is None else cluster)
    columns, seconds = measured_columns(measured), np.array([float(row.step_s) for row in measured])
    found = Coefficients()
    for _ in range(_SIMULATIONS):
        found = fit(columns, seconds / _simulated(measured, columns, place, found), place)
    return found


def _simulated(rows: Sequence[Measured], columns: Columns, cluster: Cluster, factors: Coefficients) -> Column:
    """How many times longer than by the closed form, which is what `fit` follows, each step is predicted: pipelines by
    the simulator, and stages each by what it gives up."""
    steps = step_time(columns, cluster, factors).step
    longer = np.ones(len(rows))
    for i, row in enumerate(rows):
        if row.layout.pp > 1 or row.layout.by_stage:
            longer[i] = timed(row.model, row.layout, cluster, row.batch, factors, "bf16").step_s / steps[i]
    return longer


def measured_row(row: Mapping[str, Any], what: str = "a row") -> Measured:
    """A mapping, as read from a file of measurements, as ``Measured``. what: how messages name it.

    Either ``model`` (anything ``model_shape`` takes), ``layout`` (fields of ``Layout``), ``sequences``, ``seq``,
    ``step_s``; or one flat row with the columns of vTrain's tables, a GPT that Megatron-DeepSpeed trained: ``layers``,
    ``hidden``, ``heads``, ``seq``, ``tp``, ``dp``, ``pp``, ``micro_batch``, ``global_batch``, ``iteration_ms``.
    Raises LockstepError for a value that is missing or of another type; whether they go together, `calibrate` says.
    """
    if isinstance(row, Mapping) and "iteration_ms" in row:
        return _flat_row(row, f"calibrate: {what}")
    known_keys(row, _ROW, f"calibrate: {what}")
    if missing := [name for name in _ROW if name not in row]:
        raise LockstepError(f"calibrate: {what} has no {missing[0]}: it needs {', '.join(_ROW)}.")
    layout = typed(Layout, row["layout"], f"calibrate: {what}: layout")
    batch = Batch(*(whole(row[name], f"calibrate: {what}: {name}") for name in ("sequences", "seq")))
    try:
        return Measured(model_shape(row["model"]), layout, batch, row["step_s"])
    except LockstepError as error:
        raise LockstepError(f"calibrate: {what}: {error}") from error


_ROW = ("model", "layout", "sequences", "seq", "step_s")


def _check(row: Measured, what: str) -> None:
    """Raise LockstepError for a time that is none, or a layout that suits neither model nor batch."""
    number(row.step_s, f"{what}: step_s, a measured time,", most=_LONGEST, above=True)
    try:
        check_layout(row.layout, model_shape(row.model), row.batch, instance(row.layout, Layout, "layout").devices)
    except LockstepError as error:
        raise LockstepError(f"{what}: {error}") from error


def _flat_row(row: Mapping[str, Any], what: str) -> Measured:
    """1F1B, full recomputation, nothing sharded, no overlap: how those tables were measured."""
    if missing := [name for name in _FLAT if name not in row]:
        raise LockstepError(f"{what} has no {missing[0]}: a flat row needs {', '.join(_FLAT)} and iteration_ms.")
    given = {name: int(_number(row, name, what)) for name in _FLAT}
    shape = megatron_gpt(given["layers"], given["hidden"], given["heads"], given["seq"])
    layout = Layout(
        pp=given["pp"],
        dp=given["dp"],
        tp=given["tp"],
        micro_batch=given["micro_batch"],
        recompute="full",
        sequence_parallel=False,
        overlap=False,
    )
    return Measured(shape, layout, Batch(given["global_batch"], given["seq"]), _number(row, "iteration_ms", what) / 1e3)


def _number(row: Mapping[str, Any], name: str, what: str) -> float:
    """A number, which a table read from CSV has as text; a whole one but for the time."""
    try:
        value = float(row[name]) if isinstance(row[name], str) else row[name]
    except ValueError as error:
        raise LockstepError(f"{what}: {name} is {row[name]!r:.60}; give a number.") from error
    if name == "iteration_ms":
        return number(value, f"{what}: {name}", most=1e3 * _LONGEST, above=True)
    return whole(int(value) if isinstance(value, float) and value.is_integer() else value, f"{what}: {name}")


def load_measured(path: str | Path) -> list[Measured]:
    """A YAML or JSON file with a list of rows, each as ``measured_row`` takes it."""
    content = read_yaml(path, "calibrate: measured steps")
    if not isinstance(content, list):
        raise LockstepError(
            f"calibrate: {path} must hold a list of rows with model, layout, sequences, seq and step_s."
        )
    return [measured_row(row, f"row {i} of {path}") for i, row in enumerate(content)]


def measured_columns(rows: Sequence[Measured]) -> Columns:
    """The rows as columns, in their order."""
    return join([layout_columns(row.model, [row.layout], row.batch) for row in rows])


def fit(rows: Columns, seconds: Column, cluster: Cluster, layers: bool = True) -> Coefficients:
    """Coefficients for ``rows`` measured at ``seconds`` each. ``layers``: with a factor per measured layer shape.

    Gauss-Newton with damping on the logarithm of the step time; errors count by a pseudo-Huber measure, so that a
    few odd measurements do not bend the rest.
    """
    target, names = np.log(seconds), layer_keys(rows)
    shapes = {key: i for i, key in enumerate(dict.fromkeys(names))} if layers else {}
    of = np.array([shapes[key] for key in names]) if layers else np.zeros(len(rows), dtype=int)
    count = len(FITTED)

    def model(point: Column) -> Column:
        layer = np.exp(_LAYER_SPREAD * point[count + of]) if layers else np.ones(len(rows))
        factors = from_logs(point[:count], spread=cluster.uncertainty)
        return np.log(step_time(rows, cluster, factors, layer_factor=layer).step)

    def slopes(point: Column, base: Column) -> Column:
        table = np.zeros((len(rows), len(point)))
        for i in range(count):
            moved = point.copy()
            moved[i] += _STEP
            table[:, i] = (model(moved) - base) / _STEP
        if shapes:  # every row depends on one layer factor only: one evaluation gives all of them
            moved = point.copy()
            moved[count:] += _STEP
            table[np.arange(len(rows)), count + of] = (model(moved) - base) / _STEP
        return table

    best = _descend(model, slopes, target, np.zeros(count + len(shapes)))
    found = {key: float(np.exp(_LAYER_SPREAD * best[count + i])) for key, i in shapes.items()}
    return from_logs(best[:count], found, cluster.uncertainty)


def _descend(
    model: Callable[[Column], Column], slopes: Callable[[Column, Column], Column], target: Column, point: Column
) -> Column:
    """The minimum of the sum of pseudo-Huber errors plus half the squared length of ``point``."""

    def cost(predicted: Column, at: Column) -> float:
        error = (predicted - target) / _NOISE
        return float(np.sum(np.sqrt(1 + error**2) - 1) + at @ at / 2)

    damping, base = 1e-3, model(point)
    for _ in range(_ITERATIONS):
        error = (base - target) / _NOISE
        weight = 1 / np.sqrt(1 + error**2)
        table = slopes(point, base) / _NOISE
        gradient = table.T @ (weight * error) + point
        curvature = (table.T * weight) @ table + np.eye(len(point))
        before = cost(base, point)
        for _ in range(8):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            trial = model(point - step)
            if cost(trial, point - step) < before:
                break
            damping *= 10
        else:
            return point
        point, base, damping = point - step, trial, damping / 10
        if before - cost(base, point) < 1e-4 * before:
            return point
    return point


def without_layers(factors: Coefficients) -> Coefficients:
    """The physical factors alone."""
    return replace(factors, layer={})
