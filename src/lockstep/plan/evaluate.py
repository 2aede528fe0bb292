"""Every candidate by closed form: what it takes of time and memory; those that may be among the best made to fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.plan.candidates import candidates
from lockstep.plan.cluster import Cluster
from lockstep.plan.coefficients import Coefficients
from lockstep.plan.columns import Column, columns
from lockstep.plan.layout import RECOMPUTE, SCHEDULES, SPLIT, Batch, Layout
from lockstep.plan.memory import memory
from lockstep.plan.pins import Pins
from lockstep.plan.savings import as_they_are, rows_of, with_savings
from lockstep.plan.shape import ModelShape
from lockstep.plan.steptime import step_time

FINALISTS = 100
_ROOMY = 0.9
"""Of the capacity: what counts as less by closed form should fit at every step, and is walked all the same."""
_AT_ONCE = 4096
"""Candidates that are evaluated at once: their columns stay in a core's cache."""
BY_STAGE_PINS = {"recompute_per_stage": "recompute_layers", "offload_per_stage": "offload_layers"}


@dataclass(frozen=True)
class Evaluated:
    """All candidates by closed form: bytes on the fullest rank and seconds per step, shape ``[rows]``. Those that are
    slower than a hundred that surely fit are as they are, with no single layers recomputed or offloaded to fit."""

    table: dict[str, Column]
    memory: Column
    seconds: Column
    layers_per_stage: tuple[int, ...] = ()

    @property
    def split(self) -> NDArray[np.bool_]:
        """Whether the backward is in two steps."""
        codes = [SCHEDULES.index(name) for name in SPLIT]
        return np.isin(self.table["schedule"], codes) & (self.table["pp"] > 1)

    def surely_fits(self, cluster: Cluster) -> NDArray[np.bool_]:
        """Of those with a backward in one step, which leave room for what closed forms miss."""
        return ~self.split & (self.memory <= _ROOMY * cluster.device.capacity)

    def layout(self, row: int) -> Layout:
        """One candidate as a value."""
        whole: dict[str, Any] = {name: int(column[row]) for name, column in self.table.items() if name in _OF_LAYOUT}
        whole["schedule"] = SCHEDULES[whole["schedule"]]
        whole["recompute"] = RECOMPUTE[whole["recompute"]]
        whole["sequence_parallel"] = bool(whole["sequence_parallel"])
        return Layout(**whole, layers_per_stage=self.layers_per_stage)


_OF_LAYOUT = {field.name for field in fields(Layout)}


def evaluate(
    shape: ModelShape, cluster: Cluster, batch: Batch, fixed: Pins, factors: Coefficients, dtype: str = "bf16"
) -> Evaluated:
    """Every candidate, whether it fits in memory or not. Where numbers are pinned stage by stage, with the largest: the
    most that is saved, in the most time.

    Saving memory never makes a step shorter. So candidates are made to fit in the order of what they take without,
    until as many as there are finalists surely fit and are faster than all that are left. ``fixed``: pins of
    `check_pins`.
    """
    cut = fixed.get("layers_per_stage", ())
    table = candidates(shape, cluster, batch, fixed)
    fixed = {**fixed} | {name: max(fixed[key]) for key, name in BY_STAGE_PINS.items() if key in fixed}
    table = as_they_are(table, fixed)
    count = len(table["pp"])
    table["position"] = np.arange(count, dtype=np.float64)

    def found(part: dict[str, Column]) -> Evaluated:
        rows = columns(shape, part, batch)
        return Evaluated(part, memory(rows).total, step_time(rows, cluster, factors, dtype).step, cut)

    parts = [rows_of(table, rows) for rows in _slices(np.arange(count))]
    least = np.concatenate([step_time(columns(shape, p, batch), cluster, factors, dtype).step for p in parts])
    done, fastest, order = [], np.full(FINALISTS, np.inf), np.argsort(least, kind="stable")
    for rows in _slices(order):
        part = rows_of(table, rows)
        if least[rows[0]] <= fastest[-1]:
            part = with_savings(part, shape, cluster, batch, factors, fixed)
            part["position"][len(rows) :] += count  # those that offload, behind all others
        done.append(its := found(part))
        fastest = np.sort(np.concatenate([fastest, its.seconds[its.surely_fits(cluster)]]))[:FINALISTS]
    return _joined(done, cut)


def _slices(order: NDArray[np.int_]) -> Iterator[NDArray[np.int_]]:
    return (order[i : i + _AT_ONCE] for i in range(0, len(order), _AT_ONCE))


def _joined(parts: list[Evaluated], cut: tuple[int, ...]) -> Evaluated:
    """All of them, in the order of their positions."""
    table = {name: np.concatenate([part.table[name] for part in parts]) for name in parts[0].table}
    order = np.argsort(table.pop("position"))
    memory_, seconds = (np.concatenate([getattr(part, name) for part in parts]) for name in ("memory", "seconds"))
    return Evaluated({name: column[order] for name, column in table.items()}, memory_[order], seconds[order], cut)
