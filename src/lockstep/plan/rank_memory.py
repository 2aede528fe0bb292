"""Memory of one rank at every step of its schedule: what stays, what each step holds, the peak and its moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import LockstepError
from lockstep.parallel.schedules import schedule
from lockstep.plan.columns import Column, Columns, layout_columns
from lockstep.plan.layout import Batch, Layout, check_layout
from lockstep.plan.memory import MARGIN, buffer_bytes, logits_bytes, stage_bytes, state_bytes, working_bytes
from lockstep.plan.refine import layers_of_chunks
from lockstep.plan.shape import ModelShape, model_shape
from lockstep.plan.simulate import held


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. ``fixed``: parts that stay all the time. ``steps``: every step of the rank's row of the
    schedule with the activations held while it runs; ``passing``: what a step needs besides (logits on the last
    stage, recomputed and working activations)."""

    rank: int
    stage: int
    fixed: dict[str, float]
    steps: tuple[tuple[str, float], ...]
    passing: dict[str, float]

    @property
    def peak(self) -> float:
        """The most bytes at any step, with the margin for fragmentation on all but the buffers."""
        return self.at(self.peak_step)

    @property
    def peak_step(self) -> int:
        """The position of the step at which the peak is reached first."""
        return int(np.argmax([held_bytes for _, held_bytes in self.steps]))

    def at(self, step: int) -> float:
        """Bytes while a step runs."""
        moving = self.steps[step][1] + sum(self.passing.values())
        kept = {name: value for name, value in self.fixed.items() if name != "buffers"}
        return (sum(kept.values()) + moving) * (1 + MARGIN) + self.fixed["buffers"]


def rank_memory(
    model: str | Path | Mapping[str, Any] | ModelShape, layout: Layout, batch: Batch, rank: int = 0
) -> RankMemory:
    """The memory of a rank of the mesh (pp outermost, then dp, cp, tp) over its schedule.

    Raises LockstepError for a rank that the mesh does not have, or a layout that suits neither model nor batch.
    """
    shape = model_shape(model)
    check_layout(layout, shape, batch, layout.devices)
    if not 0 <= rank < layout.devices:
        raise LockstepError(f"rank {rank} is not in the mesh: {layout.describe()} has ranks 0 to {layout.devices - 1}.")
    stage = rank // (layout.dp * layout.cp * layout.tp)
    rows = layout_columns(shape, [layout], batch)
    table = schedule(layout.schedule, layout.pp, layout.micro_batches(batch), chunks=layout.chunks)
    layers = layers_of_chunks(layout, shape.layers)
    mine = _stage_rows(rows, float(sum(layers[stage])))
    per_layer = float(stage_bytes(mine)[0]) / sum(layers[stage])
    per_chunk = [[per_layer * n for n in chunks] for chunks in layers]
    held_bytes = held(table, stage, m_b=per_chunk)
    groups = [table.group(stage, chunk) for chunk in range(layout.chunks)]
    first, last = 0 in groups, layout.pp * layout.chunks - 1 in groups
    ends = np.array([float(first) + float(last and not (shape.tied and first))])
    weights, gradients, optimizer = state_bytes(mine, ends)
    return RankMemory(
        rank=rank,
        stage=stage,
        fixed={
            "weights": float(weights[0]),
            "gradients": float(gradients[0]),
            "optimizer": float(optimizer[0]),
            "buffers": float(buffer_bytes(mine)[0]),
        },
        steps=tuple((str(step), float(n)) for step, n in zip(table.rows[stage], held_bytes, strict=True)),
        passing={"working": float(working_bytes(mine)[0]), "logits": float(logits_bytes(mine)[0]) if last else 0.0},
    )


def _stage_rows(rows: Columns, layers: float) -> Columns:
    """The row as seen from a stage with so many layers."""
    count: Column = np.array([layers])
    return replace(rows, slow_layers=count, last_layers=count)
