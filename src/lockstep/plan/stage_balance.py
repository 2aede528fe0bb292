"""The best candidates of a search, stage by stage: layers, recomputation and offload of each under its own memory.

The first stages of a pipeline hold the most micro-batches: what they must recompute, the last ones can keep. The
balance program proposes a cut into stages; each stage of it, and of the even cut, then gives up as little as its own
memory at every step of the schedule asks; the fastest in the simulator is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from math import ceil

import numpy as np

from lockstep.errors import LockstepError
from lockstep.plan.balance import balance
from lockstep.plan.balance_problem import BalanceProblem, End, Keep, Layers
from lockstep.plan.cluster import Cluster
from lockstep.plan.coefficients import Coefficients
from lockstep.plan.columns import Columns, layout_columns
from lockstep.plan.gathered_bytes import working_bytes
from lockstep.plan.kept_bytes import layer_bytes, message_bytes
from lockstep.plan.layout import Batch, Layout
from lockstep.plan.loss_bytes import logits_bytes
from lockstep.plan.memory import MARGIN, buffer_bytes, state_bytes
from lockstep.plan.per_stage import as_full, own_seconds, stage_columns, stage_memory, stages_step_time
from lockstep.plan.pins import Pins
from lockstep.plan.refine import simulated_micro_batches
from lockstep.plan.savings import worth_offloading
from lockstep.plan.shape import ModelShape
from lockstep.plan.steptime import step_time

_STEPS = 8_000
"""Longest schedule, in steps of all stages, whose memory is walked stage by stage."""


def saves(layout: Layout, pins: Pins) -> bool:
    """Whether a layout recomputes or offloads on every stage what some stages could keep, and may choose."""
    fixed = "recompute" in pins or "recompute_layers" in pins
    gives_up = layout.recompute == "full" or layout.recompute_layers or layout.offload_layers
    return layout.pp > 1 and layout.chunks == 1 and bool(gives_up) and not fixed


def plain(layout: Layout) -> Layout:
    """The layout with nothing recomputed fully or offloaded, cut evenly."""
    kind = "none" if layout.recompute == "full" else layout.recompute
    return replace(layout, recompute=kind, recompute_layers=0, offload_layers=0, layers_per_stage=())


def balanced(
    shape: ModelShape, layout: Layout, batch: Batch, cluster: Cluster, factors: Coefficients, dtype: str, pins: Pins
) -> Layout | None:
    """The layout with layers, recomputation and offload of each stage: the fastest under the memory of all stages.

    None where no cut that was tried fits, or where the schedule is too long to walk.
    """
    base = plain(layout)
    short = as_full(base, batch)
    if 3 * base.pp * base.micro_batches(short) > _STEPS:
        return None
    known: _Known = {}

    def timed(cut: tuple[int, ...]) -> _Timed | None:
        settled = _settled(shape, replace(base, layers_per_stage=cut), (short, batch), cluster, factors, pins, known)
        if settled is None:
            return None
        return float(stages_step_time(shape, settled, batch, cluster, factors, dtype).step[0]), settled

    if "layers_per_stage" in pins:
        best = timed(layout.layers_per_stage)
        return None if best is None else best[1]
    cuts = {layout.layers_per_stage, (), *_proposed(shape, base, batch, cluster, factors, dtype)}
    if not (found := [one for cut in cuts if (one := timed(cut)) is not None]):
        return None
    best = min(found, key=_seconds)
    for _ in range(_MOVES):
        rows = stage_columns(shape, best[1], batch)
        own = own_seconds(step_time(rows, cluster, factors, dtype), best[1])
        layers = best[1].layers_per_stage or _even(shape.layers, base.pp)
        moved = [one for cut in _relieved(layers, int(np.argmax(own))) if (one := timed(cut)) is not None]
        nearest = min(moved, key=_seconds, default=best)
        if _seconds(nearest) >= _seconds(best):
            break
        best = nearest
    return best[1]


_MOVES = 8
"""Layers that are moved away from the slowest stage, one after the other, as long as that helps."""
_Timed = tuple[float, Layout]
_Known = dict[tuple[int, int, int], tuple[int, int] | None]
"""What a stage with so many layers, so many of which may be offloaded, gives up; it depends on nothing else."""


def _seconds(one: _Timed) -> float:
    return one[0]


def _relieved(layers: tuple[int, ...], slow: int) -> Iterator[tuple[int, ...]]:
    """The cuts with one layer less on the slowest stage and one more on another."""
    for other in range(len(layers)):
        if other != slow and layers[slow] > 1:
            yield tuple(n + (stage == other) - (stage == slow) for stage, n in enumerate(layers))


def _settled(
    shape: ModelShape, cut: Layout, batches: tuple[Batch, Batch], cluster: Cluster, factors: Coefficients, pins: Pins,
    known: _Known,
) -> Layout | None:  # fmt: skip
    """The cut with as little given up on every stage as its memory asks; None if all is not enough on one. batches:
    with as many micro-batches as are walked through, and the whole one."""
    layers = cut.layers_per_stage or _even(shape.layers, cut.pp)
    away = 0 if "offload_layers" in pins else _offloadable(shape, cut, batches[0], cluster, factors)
    again, offloaded = [0] * cut.pp, [0] * cut.pp
    for stage, count in enumerate(layers):

        def over(recompute: int, offload: int, stage: int = stage) -> float:
            tried = replace(
                cut,
                recompute_per_stage=tuple(recompute if s == stage else 0 for s in range(cut.pp)),
                offload_per_stage=tuple(offload if s == stage else 0 for s in range(cut.pp)),
            )
            return stage_memory(shape, tried, batches[0], stage, batches[1]).peak - cluster.device.capacity

        key = (stage, count, min(away, count))
        if key not in known:
            known[key] = _least(count, min(away, count), int(pins.get("offload_layers", 0)), cache(over))
        if (choice := known[key]) is None:
            return None
        again[stage], offloaded[stage] = choice
    return replace(cut, recompute_per_stage=tuple(again), offload_per_stage=tuple(offloaded))


def _least(count: int, most: int, pinned: int, over: Callable[[int, int], float]) -> tuple[int, int] | None:
    """Layers of a stage to recompute and to offload: nothing, else what hides, else the fewest recomputed.

    ``most``: layers whose offload hides; ``pinned``: layers that must be offloaded; ``over``: bytes beyond the memory
    with so many recomputed and offloaded.
    """
    if over(0, pinned) <= 0:
        return 0, pinned
    if most and over(0, most) <= 0:
        return 0, _first(most, lambda offload: over(0, offload))
    ways = []
    for offload in {pinned} if pinned else {0, most}:
        if offload <= count and over(count - offload, offload) <= 0:
            ways.append((_first(count - offload, partial(_swapped, over, offload)), offload))
    return min(ways) if ways else None


def _swapped(over: Callable[[int, int], float], offload: int, recompute: int) -> float:
    return over(recompute, offload)


def _first(high: int, over: Callable[[int], float]) -> int:
    """The least number up to ``high`` that fits; ``high`` does. What a stage takes falls with the number, and nearly in
    a line, so the line through the ends says where to look; then beside it; halving ends what is left."""
    if over(0) <= 0:
        return 0
    low, looks, fitted = 0, 0, False
    while high - low > 1:
        if looks == 0:
            look = low + ceil((high - low) * over(low) / (over(low) - over(high)))
        else:
            look = (low + high) // 2 if looks > 1 else high - 1 if fitted else low + 1
        look = min(max(look, low + 1), high - 1)
        fitted = over(look) <= 0
        low, high = (low, look) if fitted else (look, high)
        looks += 1
    return high


def _offloadable(shape: ModelShape, layout: Layout, batch: Batch, cluster: Cluster, factors: Coefficients) -> int:
    """Layers of a stage that may be offloaded rather than recomputed."""
    return int(worth_offloading(layout_columns(shape, [layout], batch), cluster, factors)[0])


def _proposed(
    shape: ModelShape, base: Layout, batch: Batch, cluster: Cluster, factors: Coefficients, dtype: str
) -> Iterator[tuple[int, ...]]:
    """The cut of the balance program, whose memory is linear in the layers; none if no cut fits by its measure."""
    try:
        yield tuple(balance(_problem(shape, base, batch, cluster, factors, dtype)).layers)
    except LockstepError:
        return


def _problem(
    shape: ModelShape, base: Layout, batch: Batch, cluster: Cluster, factors: Coefficients, dtype: str
) -> BalanceProblem:
    """Times in seconds of one micro-batch, memory in bytes with the margin."""
    ways = [base, replace(base, recompute="full")]
    rows = layout_columns(shape, ways, batch)
    times = step_time(rows, cluster, factors, dtype)
    unit, margin = shape.layers / base.pp, 1 + MARGIN
    keeps = tuple(
        Keep(
            name,
            float(times.forward[i]) / unit,
            float(times.input_gradient[i]) / unit,
            float(layer_bytes(rows)[i]) * margin,
            float(times.weight_gradient[i]) / unit,
        )
        for i, name in enumerate(("none", "full"))
    )
    # A stage with one layer more, and with embedding or head: weights, moments, and two sums of gradients.
    row, one = rows.take([0]), np.ones(1)
    bare, more = (replace(row, slow_layers=n * one) for n in (1.0, 2.0))
    layer, ends = (_states(more, 0.0) - _states(bare, 0.0)) * margin, (_states(bare, 1.0) - _states(bare, 0.0)) * margin
    passing = float((working_bytes(row) + 2 * message_bytes(row))[0]) * margin + float(buffer_bytes(row)[0])
    return BalanceProblem(
        stages=base.pp,
        micro_batches=simulated_micro_batches(rows, 0),
        layers=(Layers("layers", shape.layers, layer, keeps),),
        memory_limit=cluster.device.capacity - passing,
        head=End(0.0, ends),
        tail=End(float(times.head[0]) / 3, ends + float(logits_bytes(row)[0]) * margin),
        schedule=base.schedule,
    )


def _states(row: Columns, vocabularies: float) -> float:
    weights, gradient, optimizer = state_bytes(row, np.array([vocabularies]))
    return float((weights + 2 * gradient + optimizer)[0])


def _even(layers: int, stages: int) -> tuple[int, ...]:
    short, longer = divmod(layers, stages)
    return tuple(short + (stage < longer) for stage in range(stages))
