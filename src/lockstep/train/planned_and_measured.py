"""The planner on this machine, for real: layouts of a small model on two processes, predicted and measured.

Every third layout calibrates, all are predicted; what counts is the error of the step time, and how much slower the
layout that is predicted to be the best is than the one that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lockstep.config import Config
from lockstep.plan import Batch, Cluster, Coefficients, Layout, Measured, ModelShape, calibrate, predict
from lockstep.plan.decoder_config import decoder_config
from lockstep.quantities import parameters
from lockstep.train.measure import LayoutSteps, measure_layouts

SHAPE = ModelShape(
    "small", 4, 256, 4, 2048, intermediate=704, kv_heads=2, head_dim=64, gated=True, tied=False
)  # fmt: skip
BATCH = Batch(16, 128)
LAYOUTS = (
    *(Layout(dp=2, micro_batch=n) for n in (1, 2, 4, 8)),
    Layout(dp=2, micro_batch=4, fsdp=1),
    Layout(dp=2, micro_batch=4, recompute="full"),
    *(Layout(pp=2, micro_batch=n) for n in (1, 2, 4)),
    *(Layout(pp=2, micro_batch=2, schedule=name) for name in ("gpipe", "zb-h1")),
    Layout(pp=2, micro_batch=2, schedule="interleaved", chunks=2),
    Layout(pp=2, micro_batch=2, schedule="zb-v", chunks=2),
    Layout(pp=2, micro_batch=2, recompute="full"),
    *(Layout(tp=2, micro_batch=n, sequence_parallel=False) for n in (1, 4)),
    Layout(tp=2, micro_batch=4, sequence_parallel=False, recompute="full"),
    *(Layout(dp=2, micro_batch=n, fsdp=level) for n, level in ((2, 2), (4, 3))),
    Layout(tp=2, micro_batch=4),
    Layout(cp=2, micro_batch=4, sequence_parallel=False),
    Layout(dp=2, micro_batch=4, offload_layers=2),
    Layout(dp=2, micro_batch=4, fsdp=3, recompute="full"),
    Layout(pp=2, micro_batch=2, offload_layers=2),
)
"""Layouts on two processes that this version runs."""
_FITTED, _ROUNDS, _STEPS = 3, 5, 2
"""One layout of so many calibrates; all take turns so many times, so many steps each."""
WHAT_IS_MEASURED = (
    f"A model of {parameters(SHAPE.parameters)} parameters, {BATCH.sequences} sequences of {BATCH.seq} tokens a step. "
    f"The layouts take turns on the same two processes, {_ROUNDS} times {_STEPS} steps each; measured is the median. "
    "Every third calibrates the description of the machine (`lockstep.plan.calibrate`), all are predicted with that."
)


@dataclass(frozen=True)
class Compared:
    """One layout: seconds of a step, measured (the median) and predicted; whether it calibrated."""

    layout: Layout
    measured: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative."""
        return abs(self.predicted / self.measured - 1)


def compare(cluster: Cluster, rounds: int = _ROUNDS, steps: int = _STEPS) -> list[Compared]:
    """Measure `LAYOUTS` in turns on two processes, calibrate ``cluster`` with some of them and predict all."""
    found = measure_layouts(_config(), [_sections(layout) for layout in LAYOUTS], rounds, steps)
    return compared(found, cluster)


def compared(found: Sequence[LayoutSteps], cluster: Cluster) -> list[Compared]:
    """The measured steps of `LAYOUTS` beside predictions calibrated with every third of them."""
    rows = [Measured(SHAPE, layout, BATCH, one.step_s) for layout, one in zip(LAYOUTS, found, strict=True)]
    factors = calibrate(rows[::_FITTED], cluster)
    return [_one(row, factors, cluster, i % _FITTED == 0) for i, row in enumerate(rows)]


def _one(row: Measured, factors: Coefficients, cluster: Cluster, fitted: bool) -> Compared:
    predicted = predict(row.model, row.layout, cluster, row.batch, factors).step_s
    return Compared(row.layout, row.step_s, predicted, fitted)


def mean_error(rows: Sequence[Compared]) -> float:
    """Of the layouts that did not calibrate."""
    return fmean(row.error for row in rows if not row.fitted)


def regret(rows: Sequence[Compared]) -> float:
    """How much slower the layout with the least predicted time is than the fastest one."""
    chosen = min(rows, key=lambda row: row.predicted)
    return chosen.measured / min(row.measured for row in rows) - 1


def _config() -> Config:
    model = decoder_config(SHAPE, BATCH.seq).model_dump()
    return Config.model_validate({
        "model": model, "data": {"seq_len": BATCH.seq, "max_bytes": 400_000},
        "train": {"eval_every": 0, "tensorboard": False},
    })  # fmt: skip


def _sections(layout: Layout) -> dict[str, dict[str, Any]]:
    keys = ("pp", "dp", "cp", "tp", "fsdp", "schedule", "recompute", "offload_layers")
    parallel: dict[str, Any] = {key: getattr(layout, key) for key in keys}
    parallel["sequence_parallel"] = layout.sequence_parallel and layout.tp > 1
    parallel["chunks"] = layout.chunks if layout.schedule == "interleaved" else None
    micro_batches = BATCH.sequences // layout.micro_batch
    train = {"micro_batch": layout.micro_batch, "micro_batches": micro_batches, "canonical_tp": layout.tp}
    return {"parallel": parallel, "train": train}
