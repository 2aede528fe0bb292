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
from pydantic import TypeAdapter, ValidationError

from lockstep.errors import LockstepError
from lockstep.given import number, whole
from lockstep.plan.cluster import Cluster, cluster_of
from lockstep.plan.coefficients import FITTED, Coefficients, from_logs, layer_keys
from lockstep.plan.columns import Column, Columns, join, layout_columns
from lockstep.plan.layout import Batch, Layout, check_layout
from lockstep.plan.named_shape import model_shape
from lockstep.plan.shape import ModelShape, megatron_gpt
from lockstep.plan.steptime import step_time
from lockstep.plan.yaml_file import read_yaml

_NOISE = 0.04
"""Relative error of a row that the factors do not explain."""
_LAYER_SPREAD = 0.1
"""Plausible relative error of one layer shape's predicted time (kernel choice, alignment, launch jitter)."""
_FLAT = ("layers", "hidden", "heads", "seq", "tp", "dp", "pp", "micro_batch", "global_batch")
_STEP = 1e-3
_ITERATIONS = 25


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
    measured = [row if isinstance(row, Measured) else measured_row(row) for row in rows]
    if not measured:
        raise LockstepError("calibrate: no measured steps given: it needs at least one row with step_s.")
    for i, row in enumerate(measured):
        number(row.step_s, f"calibrate: step_s of row {i}, a measured time,", above=True)
        check_layout(row.layout, model_shape(row.model), row.batch, row.layout.devices)
    place = cluster_of("8xA100-80" if cluster is None else cluster)
    return fit(measured_columns(measured), np.array([row.step_s for row in measured]), place)


def measured_row(row: Mapping[str, Any]) -> Measured:
    """A mapping, as read from a file of measurements, as ``Measured``.

    Either ``model`` (anything ``model_shape`` takes), ``layout`` (fields of ``Layout``), ``sequences``, ``seq``,
    ``step_s``; or one flat row with the columns of vTrain's tables, a GPT that Megatron-DeepSpeed trained: ``layers``,
    ``hidden``, ``heads``, ``seq``, ``tp``, ``dp``, ``pp``, ``micro_batch``, ``global_batch``, ``iteration_ms``.
    """
    if not isinstance(row, Mapping):
        raise LockstepError(f"calibrate: a row is {row!r}: expected model, layout, sequences, seq and step_s.")
    try:
        if "iteration_ms" in row:
            return _flat_row(row)
        Layout(**row["layout"])  # refuses an unknown key
        layout = TypeAdapter(Layout).validate_python(row["layout"])
        batch, shape = Batch(*(_whole(row, name) for name in ("sequences", "seq"))), model_shape(row["model"])
        check_layout(layout, shape, batch, layout.devices)
        return Measured(shape, layout, batch, float(row["step_s"]))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, ("layout", *first["loc"])))
        raise LockstepError(f"calibrate: {name} is {first['input']!r}: {first['msg']}, in {dict(row)}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise LockstepError(
            f"calibrate: a row needs model, layout, sequences, seq and step_s; this one fails on {error}: {dict(row)}"
        ) from error


def _flat_row(row: Mapping[str, Any]) -> Measured:
    """1F1B, full recomputation, nothing sharded, no overlap: how those tables were measured."""
    given = {name: _whole(row, name) for name in _FLAT}
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
    batch = Batch(given["global_batch"], given["seq"])
    check_layout(layout, shape, batch, layout.devices)
    return Measured(shape, layout, batch, float(row["iteration_ms"]) / 1e3)


def _whole(row: Mapping[str, Any], name: str) -> int:
    """A whole number, which a table read from CSV has as text."""
    value = row[name]
    read = float(value) if isinstance(value, str) else value
    return whole(int(read) if isinstance(read, float) and read.is_integer() else value, f"calibrate: {name}")


def load_measured(path: str | Path) -> list[Measured]:
    """A YAML or JSON file with a list of rows, each as ``measured_row`` takes it."""
    content = read_yaml(path, "calibrate: measured steps")
    if not isinstance(content, list):
        raise LockstepError(
            f"calibrate: {path} must hold a list of rows with model, layout, sequences, seq and step_s."
        )
    return [measured_row(row) for row in content]


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
