"""Memory of one rank at every step of its schedule: what stays, what each step holds, the peak and its moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import LockstepError
from lockstep.given import instance, whole
from lockstep.parallel.schedules import Step
from lockstep.plan.columns import Column, Columns, layout_columns
from lockstep.plan.gathered_bytes import gathers
from lockstep.plan.gradient_bytes import sums_when_reducing, unit_bytes
from lockstep.plan.layout import Batch, Layout, check_layout
from lockstep.plan.loss_bytes import token_bytes
from lockstep.plan.memory import MARGIN, buffer_bytes, state_bytes
from lockstep.plan.named_shape import model_shape
from lockstep.plan.parameters import expert_parameters
from lockstep.plan.rank_sizes import RankSizes
from lockstep.plan.rank_steps import worst_moment
from lockstep.plan.rank_sums import ahead, experts_grow, halves, rows_at_the_end, sent_off, waits
from lockstep.plan.refine import layers_of_chunks, table_of
from lockstep.plan.shape import ModelShape
from lockstep.plan.streams import streams_held


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. ``fixed``: parts that stay all the time. ``steps``: every step of the rank's row of the
    schedule with the activations that are held as it begins; ``moments``: the most at every step, and after the last
    one while gradients are reduced, by kind (gradients, activations, loss,
    working, messages)."""

    rank: int
    stage: int
    fixed: dict[str, float]
    steps: tuple[tuple[str, float], ...]
    moments: tuple[dict[str, float], ...]

    @property
    def peak(self) -> float:
        """The most bytes at any step, with the margin for fragmentation on all but the buffers."""
        return self.at(self.peak_step)

    @property
    def tensors(self) -> float:
        """The most bytes of tensors at any step: what the dry-run of the rank sees, without buffers and margin."""
        return max(map(self._held, range(len(self.moments))))

    @property
    def peak_step(self) -> int:
        """The position of the step at which the peak is reached first; ``len(steps)``: when gradients are reduced."""
        return int(np.argmax([self._held(i) for i in range(len(self.moments))]))

    @property
    def peak_name(self) -> str:
        """That step, such as ``BW7``."""
        return self.steps[self.peak_step][0] if self.peak_step < len(self.steps) else "reduction"

    def at(self, step: int) -> float:
        """Bytes at the worst moment of a step."""
        return self._held(step) * (1 + MARGIN) + self.fixed["buffers"]

    def _held(self, step: int) -> float:
        stays = sum(value for name, value in self.fixed.items() if name != "buffers")
        return stays + sum(self.moments[step].values())


def rank_memory(
    model: str | Path | Mapping[str, Any] | ModelShape, layout: Layout, batch: Batch, rank: int = 0
) -> RankMemory:
    """The memory of a rank of the mesh (pp outermost, then dp, cp, tp) over its schedule.

    Raises LockstepError for a rank that the mesh does not have, or a layout that suits neither model nor batch.
    """
    shape = model_shape(model)
    check_layout(layout, shape, batch, instance(layout, Layout, "layout").devices)
    if whole(rank, "rank", least=0) >= layout.devices:
        raise LockstepError(f"rank {rank} is not in the mesh: {layout.describe()} has ranks 0 to {layout.devices - 1}.")
    stage = rank // (layout.dp * layout.cp * layout.tp)
    rows = layout_columns(shape, [layout], batch)
    table = table_of(layout.schedule, layout.pp, layout.micro_batches(batch), layout.chunks)
    layers = layers_of_chunks(layout, shape.layers)
    mine = _stage_rows(rows, layout, stage, float(sum(layers[stage])))
    last = table.groups - 1 in (groups := [table.group(stage, chunk) for chunk in range(layout.chunks)])
    uses = float(0 in groups) + float(last and not (shape.tied and 0 in groups))
    owns = uses - float(shape.tied and 0 in groups and not last)  # a tied embedding is the last stage's
    weights, _, _ = (float(n[0]) for n in state_bytes(mine, np.array([uses])))
    _, gradient, optimizer = (float(n[0]) for n in state_bytes(mine, np.array([owns])))
    if gathers(mine)[0]:  # a tied embedding that another stage owns is whole here
        weights += (uses - owns) * float(unit_bytes(mine)[1][0]) * (1 - 1 / float(mine.sharing[0]))
    fixed = {
        "weights": weights,
        "optimizer": optimizer,
        "tokens": float(token_bytes(mine)[0]),
        "buffers": float(buffer_bytes(mine)[0]),
    }
    replica = rank // (layout.cp * layout.tp) % layout.dp
    tied = shape.tied and shape.states == "masters"
    streams = streams_held(layout.schedule, layout.pp, layout.micro_batches(batch), layout.chunks, tied, stage)
    sizes = RankSizes(table, streams, stage, layers, mine, gradient, shape, replica)
    steps = tuple((str(step), float(n)) for step, n in zip(table.rows[stage], sizes.activations, strict=True))
    return RankMemory(rank, stage, fixed, steps, tuple(_moments(sizes)))


def _moments(rank: RankSizes) -> Iterator[dict[str, float]]:
    """The worst moment of every step, then that of the reduction."""
    done, others, streams = [0] * rank.table.chunks, halves(rank), iter(rank.streams)
    open_heads, early, rows, leaving = _open_heads(rank), ahead(rank), 0, 0.0
    for position, (step, activations) in enumerate(zip(rank.table.rows[rank.stage], rank.activations, strict=True)):
        (opened, left_open), (waiting, left), ends, held = next(open_heads), next(others), next(early), next(streams)
        found = [_moment(rank, part, float(activations), done, opened) for part in step.parts]
        if leaving:
            _not_left(rank, step, found, float(activations), leaving)
        found = [moment | {"gradients": moment["gradients"] + waiting + ends} for moment in found]
        if position in rank.rows_after:
            taken = _rows_taken(rank, step, float(activations), done, left_open)
            found.append(taken | {"gradients": taken["gradients"] + left + ends})
        messages = rank.message * held.streams + rank.rows * (rows + held.rows)
        yield max(found, key=lambda m: sum(m.values())) | {"messages": messages}
        for part in step.parts:
            rows += part.kind in ("B", "BW") and rank.groups[part.chunk] == 0
            done[part.chunk] += part.kind in ("W", "BW")
        if step.kind == "F":
            leaving = rank.passes[step.chunk].leaving
        elif any(part.kind != "W" and rank.passes[part.chunk].away for part in step.parts):
            leaving = 0.0
    yield {"gradients": max([_reduced(rank), *rows_at_the_end(rank)])}


def _reduced(rank: RankSizes) -> float:
    """Bytes of gradients as they are added up over replicas after the last step."""
    sums = 1.0 if rank.mixed else float(sums_when_reducing(rank.mine)[0])
    if rank.copies and rank.ranks > 1 and rank.mine.fsdp[0] == 2:  # of an expert there are fewer replicas
        fewer = float((expert_parameters(rank.mine) * (1 - 1 / rank.mine.ep))[0]) * 4
        return sum(rank.gradient) * sums - fewer
    sent = rank.sent or [sums] * len(rank.gradient)
    return sum(one * times for one, times in zip(rank.gradient, sent, strict=True))


def _not_left(rank: RankSizes, step: Step, found: list[dict[str, float]], activations: float, leaving: float) -> None:
    """Add what a layer that is being offloaded still holds: until the first layer of the next F is over, or a backward
    begins in which layers come back."""
    one = rank.passes[step.chunk]
    if step.kind == "F":
        less = rank.full[step.chunk] - one.first_layer
        found.append(
            found[0] | {"activations": activations - less + leaving, "working": rank.forward + rank.light - rank.calm}
        )
    elif not one.away:
        found[:] = [moment | {"activations": moment["activations"] + leaving} for moment in found]


def _rows_taken(rank: RankSizes, step: Step, activations: float, done: list[int], opened: bool) -> dict[str, float]:
    """After a step, as the first stage's rows of a tied embedding's gradient are made as large as it is, and the sum of
    both goes to other replicas."""
    after = [n + sum(part.kind in ("W", "BW") and part.chunk == c for part in step.parts) for c, n in enumerate(done)]
    for part in step.parts:
        change = {"BW": rank.full, "W": rank.late}.get(part.kind)
        activations -= change[part.chunk] if change else 0.0
    sums = sum(waits(rank, c, after) for c in range(len(after)))
    return {
        "gradients": sums + rank.words * max(1.0, rank.copies),
        "activations": activations,
        "working": rank.tail * opened,
    }


def _open_heads(rank: RankSizes) -> Iterator[tuple[bool, bool]]:
    """For every step, whether the head's weights are there, gathered for a loss, as it begins and as it ends."""
    count = 0
    for step in rank.table.rows[rank.stage]:
        before = count
        for part in step.parts:
            if rank.groups[part.chunk] == rank.ends:
                count += {"F": 1, "B": -1, "BW": -1}.get(part.kind, 0)
        yield bool(rank.tail and before), bool(rank.tail and count)


def _moment(rank: RankSizes, step: Step, activations: float, done: list[int], opened: bool) -> dict[str, float]:
    chunk = step.chunk
    if rank.mixed:
        sums, growing = sum(rank.gradient), 0.0
    else:
        sums = sum(waits(rank, c, done) for c in range(len(done)))
        growing = rank.gradient[chunk] + experts_grow(rank, chunk, done[chunk])
    found = {"gradients": sums, "activations": activations, "working": rank.working}
    if rank.sent and step.kind in ("W", "BW") and done[chunk] + 1 == rank.table.micro_batches:
        ending = sent_off(rank, found, step, done)
        usual = worst_moment(rank, found, step, done, sums, growing, opened)
        return max(ending, usual, key=lambda m: sum(m.values()))
    return worst_moment(rank, found, step, done, sums, growing, opened)


def _stage_rows(rows: Columns, layout: Layout, stage: int, layers: float) -> Columns:
    """The row as seen from a stage with so many layers."""
    count: Column = np.array([layers])
    again, away = (np.array([float(counts[stage])]) for counts in (layout.recomputed, layout.offloaded))
    return replace(rows, slow_layers=count, last_layers=count, recompute_layers=again, offload_layers=away)
