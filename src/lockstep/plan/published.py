"""How far the planner is from published and measured runs: the table that `lockstep bench plan` prints."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import LockstepError
from lockstep.plan.activations import activation_bytes
from lockstep.plan.calibrate import fit, measured_columns, measured_row
from lockstep.plan.cluster import Cluster, load_cluster
from lockstep.plan.coefficients import Coefficients
from lockstep.plan.columns import Column, Columns, layout_columns
from lockstep.plan.layout import Batch, Layout, Recompute
from lockstep.plan.memory import memory
from lockstep.plan.named_shape import model_shape
from lockstep.plan.predict import predict
from lockstep.plan.published_schedules import schedule_lines
from lockstep.plan.shape import megatron_gpt
from lockstep.plan.steptime import step_time

_NETWORK_GB_S = 11.5
"""vTrain's cluster: 800 Gb/s between nodes of 8 devices, at 92 %."""


@dataclass(frozen=True)
class ErrorLine:
    """One line of the table: error and target, in per cent unless ``unit`` says otherwise."""

    table: str
    measure: str
    error: float
    target: float
    unit: str = " %"

    @property
    def met(self) -> bool:
        return self.error <= self.target


def error_table(folder: Path) -> list[ErrorLine]:
    """All lines. ``folder`` holds the oracle tables (``tests/oracles`` of the repository); LockstepError if not."""
    if not (folder / "activation_memory.csv").exists():
        raise LockstepError(f"{folder} has no oracle tables: run in the repository or give --oracles tests/oracles.")
    lines = [
        ErrorLine(
            "activation_memory.csv", "largest difference of 5 kinds x 4 models", activations(folder), 0.005, " GiB"
        )
    ]
    errors = megatron(folder)
    lines.append(ErrorLine("megatron_sc21.csv", "mean error, nothing fitted", _mean(errors), 10.0))
    for name, target in (("multi", 6.0), ("single", 8.0)):
        table, file = vtrain(folder, name), f"vtrain_{name}_node.csv"
        lines.append(ErrorLine(file, "mean error, nothing fitted", _mean(table.described()), np.inf))
        lines.append(ErrorLine(file, "mean error, 5-fold, layer shapes", _mean(table.folds()), target))
        lines.append(ErrorLine(file, "mean error, 5-fold, 15 factors only", _mean(table.folds(layers=False)), target))
        for size, error in table.left_out().items():
            lines.append(ErrorLine(file, f"mean error, all of {size} left out", error, 10.0))
        lines.append(ErrorLine(file, "largest regret in a group, fitted", table.regret(table.fitted()), 5.0))
        lines.append(ErrorLine(file, "largest regret in a group, 5-fold", table.regret(table.folded()), 5.0))
    lines.append(ErrorLine("llama3_405b.csv", "mean error, nothing fitted", _mean(llama(folder)), np.inf))
    return lines + [ErrorLine(*line, unit="") for line in schedule_lines(folder)]


def activations(folder: Path) -> float:
    """Largest difference from the published GiB per device, which have three decimals, in GiB."""
    kinds: tuple[tuple[str, bool, Recompute], ...] = (
        ("none GiB", False, "none"),
        ("+SP", True, "none"),
        ("+sel", False, "selective"),
        ("+SP+sel", True, "selective"),
        ("full", False, "full"),
    )
    worst = 0.0
    for row in _read(folder / "activation_memory.csv"):
        sizes = [int(row[name]) for name in ("h", "heads")] + [2048] + [int(row[name]) for name in ("b", "L")]
        split = {"tp": int(row["t"]), "pp": int(row["p"]), "chunks": int(row["v"])}
        for column, sequence_parallel, kind in kinds:
            found = activation_bytes(*sizes, **split, sequence_parallel=sequence_parallel, recompute=kind)
            worst = max(worst, abs(found / 2**30 - float(row[column])))
    return worst


def megatron(folder: Path) -> Column:
    """Relative errors of the iteration times of arXiv 2104.04473, table 1.

    The paper does not print micro-batch and chunks per row: the fastest that fit in memory are taken, as it did.
    """
    errors = []
    for row in _read(folder / "megatron_sc21.csv"):
        shape = megatron_gpt(int(row["L"]), int(row["h"]), int(row["heads"]), 2048)
        layouts, batch = _megatron_layouts(row), Batch(int(row["GBS"]), 2048)
        rows, cluster = layout_columns(shape, layouts, batch), load_cluster(f"{row['GPUs']}xA100-80")
        seconds = step_time(rows, cluster, Coefficients()).step
        best = np.where(memory(rows).total <= cluster.device.capacity, seconds, np.inf).min()
        errors.append(best / float(row["iter s"]) - 1)
    return np.array(errors)


def _megatron_layouts(row: dict[str, str]) -> list[Layout]:
    pp, dp, tp = int(row["p"]), int(row["d"]), int(row["t"])
    layers, per_rank = int(row["L"]), int(row["GBS"]) // dp
    found = []
    for size in (n for n in (1, 2, 4, 8, 16) if per_rank % n == 0):
        for chunks in (1, 2, 3, 4, 5, 6, 8):
            interleaves = pp > 1 and layers % (pp * chunks) == 0 and per_rank // size % pp == 0
            if chunks > 1 and not interleaves:
                continue
            name = "interleaved" if chunks > 1 else "1f1b"
            layout = Layout(pp=pp, dp=dp, tp=tp, micro_batch=size, schedule=name, chunks=chunks, recompute="full")
            found.append(_as_in_2021(layout))
    return found


def llama(folder: Path) -> Column:
    """Relative errors of the MFU of Llama 3 405B (arXiv 2407.21783, table 4), 8 chunks per device."""
    errors, shape = [], replace(model_shape("llama3-405b"), residual_bytes=2, logits="kept", states="mixed")
    for row in _read(folder / "llama3_405b.csv"):
        pp, dp, cp, tp = (int(row[name]) for name in ("PP", "DP", "CP", "TP"))
        layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp, fsdp=1, schedule="interleaved", chunks=8)
        batch = Batch(int(row["batch/DP"]) * dp, int(row["seq"]))
        found = predict(shape, layout, f"{row['GPUs']}xH100", batch)
        errors.append(found.mfu / (float(row["BF16 MFU"].split()[0]) / 100) - 1)
    return np.array(errors)


@dataclass(frozen=True)
class MeasuredTable:
    """Measured steps of one file, with what the tests and the table ask of them."""

    rows: Columns
    seconds: Column
    devices: Column
    sequences: Column
    cluster: Cluster

    def described(self) -> Column:
        """Relative errors with nothing fitted."""
        return self._predict(Coefficients()) / self.seconds - 1

    def fitted(self) -> Column:
        """Predicted seconds, fitted on all rows."""
        return self._predict(fit(self.rows, self.seconds, self.cluster))

    def folded(self, layers: bool = True, folds: int = 5) -> Column:
        """Predicted seconds, each row by coefficients that were fitted without its fold."""
        order = np.random.default_rng(0).permutation(len(self.seconds))
        found = np.zeros(len(self.seconds))
        for k in range(folds):
            out = np.isin(np.arange(len(order)), order[k::folds])
            found[out] = self._without(out, layers)
        return found

    def folds(self, layers: bool = True) -> Column:
        """Relative errors of ``folded``."""
        return self.folded(layers) / self.seconds - 1

    def left_out(self) -> dict[str, float]:
        """Mean error in per cent on every hidden size when all rows of that size are kept out of the fit."""
        found = {}
        for size in np.unique(self.rows.hidden):
            out = self.rows.hidden == size
            found[f"hidden {size:.0f}"] = _mean(self._without(out, True) / self.seconds[out] - 1)
        return found

    def regret(self, predicted: Column) -> float:
        """In per cent: how much slower the layout predicted best is than the measured best, in the worst group.

        A group is one model, batch and number of devices.
        """
        keys = np.stack([self.devices, self.sequences, self.rows.hidden, self.rows.layers], axis=1)
        groups = [np.flatnonzero((keys == key).all(axis=1)) for key in np.unique(keys, axis=0)]
        chosen = [self.seconds[g[np.argmin(predicted[g])]] / self.seconds[g].min() - 1 for g in groups]
        return float(100 * max(chosen))

    def _without(self, out: NDArray[np.bool_], layers: bool) -> Column:
        """Seconds of the rows ``out`` with coefficients from all others."""
        factors = fit(self.rows.take(~out), self.seconds[~out], self.cluster, layers=layers)
        return step_time(self.rows.take(out), self.cluster, factors).step

    def _predict(self, factors: Coefficients) -> Column:
        return step_time(self.rows, self.cluster, factors).step


def vtrain(folder: Path, name: str) -> MeasuredTable:
    """``multi`` or ``single``: measured iterations of vTrain (MICRO 2024): 1F1B, full recomputation, no ZeRO."""
    measured = [measured_row(row) for row in _read(folder / f"vtrain_{name}_node.csv")]
    devices = np.array([float(row.layout.devices) for row in measured])
    sequences = np.array([float(row.batch.sequences) for row in measured])
    cluster = load_cluster(f"{int(devices.max())}xA100-80").with_level("network", gb_s=_NETWORK_GB_S)
    seconds = np.array([row.step_s for row in measured])
    return MeasuredTable(measured_columns(measured), seconds, devices, sequences, cluster)


def _as_in_2021(layout: Layout) -> Layout:
    """No sequence parallelism, no overlap of the gradient reduction."""
    return replace(layout, sequence_parallel=False, overlap=False)


def _mean(errors: Column) -> float:
    """Mean absolute error in per cent."""
    return float(100 * np.abs(errors).mean())


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
