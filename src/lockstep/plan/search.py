"""The search: of all candidates the best hundred refined and simulated, the best few of these as plans."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from heapq import heapify, heappop, heappush
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.config.parallel import BUCKET_MB
from lockstep.errors import LockstepError
from lockstep.given import whole
from lockstep.plan.buckets import in_buckets
from lockstep.plan.cluster import Cluster, cluster_of
from lockstep.plan.coefficients import Coefficients, checked
from lockstep.plan.columns import Columns, layout_columns
from lockstep.plan.evaluate import BY_STAGE_PINS, FINALISTS, Evaluated, evaluate
from lockstep.plan.infeasible import cannot_hold
from lockstep.plan.layout import MOST_TOKENS, Batch, Layout
from lockstep.plan.memory import memory
from lockstep.plan.named_shape import model_shape
from lockstep.plan.per_stage import walks, walks_that_fit
from lockstep.plan.pins import Pins, check_pins
from lockstep.plan.planfile import Plan
from lockstep.plan.predict import Prediction, check_dtype, layout_prediction, prediction, timed, with_stages
from lockstep.plan.refine import TableKey, layers_of_chunks, simulated_bubble, simulation_cost, table_key, uneven
from lockstep.plan.shape import ModelShape
from lockstep.plan.stage_balance import balanced, plain, saves
from lockstep.plan.steptime import StepTime, step_time
from lockstep.quantities import counted

_BY_STAGE = 6
"""Pipelines that are balanced stage by stage: the best of those that recompute or offload."""
_LOOKED_AT = 12
"""Of those that are looked at for it."""
_SIMULATED_STEPS = 40_000
"""Simulation stops after so many steps of work (a few seconds); the finalists after it keep their closed form."""


def search(
    model: str | Path | Mapping[str, Any] | ModelShape,
    cluster: str | Cluster,
    *,
    seq: int,
    global_batch_tokens: int,
    pins: Pins | None = None,
    top: int = 5,
    coefficients: Coefficients | None = None,
    dtype: str = "bf16",
) -> list[Plan]:
    """The best ``top`` plans, fastest first, all of which fit in memory; of plans with equal numbers the first.

    ``global_batch_tokens`` is rounded down to whole sequences of ``seq`` tokens. ``pins``: values of
    ``Layout``'s fields that must not change, such as ``{"tp": 8}``. Raises LockstepError when nothing factors, or when
    no layout fits in memory (with what would).
    """
    top = whole(top, "search: top")
    fitting = plans_that_fit(
        model,
        cluster,
        seq=seq,
        global_batch_tokens=global_batch_tokens,
        pins=pins,
        coefficients=coefficients,
        dtype=dtype,
    )
    plans = list(islice(different(fitting), min(top, sys.maxsize)))
    return [plans[0], *(compared(plan, plans[0]) for plan in plans[1:])]


def plans_that_fit(
    model: str | Path | Mapping[str, Any] | ModelShape,
    cluster: str | Cluster,
    *,
    seq: int,
    global_batch_tokens: int,
    pins: Pins | None = None,
    coefficients: Coefficients | None = None,
    dtype: str = "bf16",
) -> Iterator[Plan]:
    """The finalists of ``search`` that fit, fastest first, each walked through its schedule when it is asked for; at
    least one. Raises as ``search`` does."""
    shape, place, factors = model_shape(model), cluster_of(cluster), checked(coefficients)
    check_dtype(place, dtype)
    batch = make_batch(global_batch_tokens, seq)
    pins = check_pins({} if pins is None else pins, shape, place, batch)
    found = evaluate(shape, place, batch, pins, factors, dtype)
    fitting = found.memory <= place.device.capacity
    if not fitting.any():
        row = int(np.argmin(found.memory))
        raise LockstepError(cannot_hold(shape, place, batch, pins, found.layout(row), float(found.memory[row])))
    # Where each of the finalists takes too much at some step of its schedule, others stay below what was counted.
    asked, plain = _Asked(shape, place, batch, factors, dtype, pins), fitting & ~found.split
    for allowed in (fitting, plain, found.surely_fits(place)):
        plans = (Plan(shape, place.name, batch, *pair) for pair in _best(asked, found, allowed))
        if first := next(plans, None):
            yield first
            yield from plans
            return
    leanest = _with_lists(found.layout(int(np.argmin(np.where(fitting, found.memory, np.inf)))), pins)
    needed = max(held.peak for held in walks(shape, leanest, batch))
    raise LockstepError(cannot_hold(shape, place, batch, pins, leanest, needed))


_Ranked = tuple[Layout, Prediction]


@dataclass(frozen=True)
class _Asked:
    """What plans are searched for, and what their steps are timed by."""

    shape: ModelShape
    place: Cluster
    batch: Batch
    factors: Coefficients
    dtype: str
    pins: Pins


def make_batch(global_batch_tokens: int, seq: int) -> Batch:
    """Whole sequences of a global batch given in tokens."""
    seq = whole(seq, "seq: a sequence has at least 1 token, and it")
    global_batch_tokens = whole(global_batch_tokens, "global_batch_tokens")
    if global_batch_tokens < seq:
        raise LockstepError(
            f"global batch of {counted(global_batch_tokens, 'token')} holds no sequence of {seq}: give at least {seq}."
        )
    if global_batch_tokens > MOST_TOKENS:
        raise LockstepError(f"global batch of {global_batch_tokens} tokens: the planner counts up to {MOST_TOKENS:,}.")
    return Batch(global_batch_tokens // seq, seq)


def _best(asked: _Asked, found: Evaluated, allowed: NDArray[np.bool_]) -> Iterator[_Ranked]:
    """The best of the candidates that are allowed, fastest first."""
    seconds = np.where(allowed, found.seconds, np.inf)
    order = np.argsort(seconds, kind="stable")[:FINALISTS]
    finalists = [found.layout(int(i)) for i in order if np.isfinite(seconds[i])]
    if not finalists:
        return iter(())
    ranked, cramped = _refine(asked, finalists)
    if any(key in asked.pins for key in BY_STAGE_PINS):
        ranked = _as_pinned(asked, ranked)
    else:
        ranked = _by_stage(asked, ranked, cramped)
    return _that_fit(asked, ranked)


def _that_fit(asked: _Asked, ranked: list[_Ranked]) -> Iterator[_Ranked]:
    """Those that fit at every step of their schedule, with what they take there, fastest first. A pipeline whose time
    is from the closed form is simulated when its turn comes, and takes the place that its time then has."""
    room = asked.place.device.capacity
    left = [(its.step_s, i, layout, its) for i, (layout, its) in enumerate(ranked)]
    heapify(left)
    while left:
        _, i, layout, its = heappop(left)
        if not its.stage_memory_gb:
            stages = walks_that_fit(asked.shape, layout, asked.batch, room)
            if stages is None:
                continue
            its = with_stages(its, stages, asked.place)
            if layout.pp > 1 and not its.simulated:
                its = with_stages(_timed(asked, layout), stages, asked.place)
                heappush(left, (its.step_s, i, layout, its))
                continue
        yield layout, its


def _timed(asked: _Asked, layout: Layout) -> Prediction:
    return timed(asked.shape, layout, asked.place, asked.batch, asked.factors, asked.dtype)


def _refine(asked: _Asked, finalists: list[Layout]) -> tuple[list[_Ranked], set[Layout]]:
    """Finalists with their best cut into stages and buckets, simulated where there is a pipeline, fastest first; and
    those (as they were before) of which a faster cut than that did not fit."""
    shape, place, batch, dtype = asked.shape, asked.place, asked.batch, asked.dtype
    rows = layout_columns(shape, finalists, batch)
    times = step_time(rows, place, asked.factors, dtype)
    layer = (times.slowest - times.head) / np.maximum(rows.last_layers, 1)
    variants = [
        variant
        for i, layout in enumerate(finalists)
        for variant in uneven(layout, shape.layers, float(times.head[i] / layer[i]))
    ]
    variants = variants if "bucket_mb" in asked.pins else in_buckets(variants)
    rows = layout_columns(shape, variants, batch)
    times, held = step_time(rows, place, asked.factors, dtype), memory(rows)
    best: dict[Layout, int] = {}
    cramped: set[Layout] = set()
    for i in np.argsort(times.step, kind="stable"):
        key = _unrefined(variants[i])
        if key in best:
            continue
        if held.total[i] <= place.device.capacity:
            best[key] = int(i)
        else:
            cramped.add(key)
    chosen = sorted(best.values(), key=lambda i: float(times.step[i]))
    bubbles = _simulate(rows, times, variants, chosen)
    found = [(variants[i], prediction(shape, rows, times, i, place, batch, dtype, bubbles.get(i))) for i in chosen]
    return sorted(found, key=lambda pair: pair[1].step_s), cramped


def _with_lists(layout: Layout, pins: Pins) -> Layout:
    """The layout with what is pinned stage by stage, instead of the same number on all."""
    changes: dict[str, Any] = {}
    for key, name in BY_STAGE_PINS.items():
        changes |= {key: pins[key], name: 0} if key in pins else {}
    return replace(layout, **changes)


def _as_pinned(asked: _Asked, ranked: list[_Ranked]) -> list[_Ranked]:
    """The ranking with what is pinned stage by stage."""
    found = {}
    for layout, _ in ranked:
        its = _with_lists(layout, asked.pins)
        layers = map(sum, layers_of_chunks(its, asked.shape.layers))
        if all(a + b <= n for a, b, n in zip(its.recomputed, its.offloaded, layers, strict=True)):
            found[its] = _timed(asked, its)
    return sorted(found.items(), key=lambda pair: pair[1].step_s)


def _by_stage(asked: _Asked, ranked: list[_Ranked], cramped: set[Layout]) -> list[_Ranked]:
    """The ranking with the best pipelines that recompute or offload also stage by stage, where that is faster. Not of
    those whose fastest cut fits without."""
    shape, place, batch, factors, dtype = asked.shape, asked.place, asked.batch, asked.factors, asked.dtype
    fitting = {_unrefined(layout) for layout, _ in ranked} - cramped
    first: dict[Layout, tuple[Layout, Prediction]] = {}
    for layout, found in ranked:
        if saves(layout, asked.pins) and (key := _unrefined(plain(layout))) not in fitting:
            first.setdefault(key, (layout, found))
    more = list(ranked)
    balances = ((*pair, balanced(shape, pair[0], batch, place, factors, dtype, asked.pins)) for pair in first.values())
    # Those of which no cut fits at every step of their schedule take nobody's place.
    possible = ((layout, found, better) for layout, found, better in islice(balances, _LOOKED_AT) if better is not None)
    for layout, found, better in islice(possible, _BY_STAGE):
        its = layout_prediction(shape, better, place, batch, factors, dtype)
        found = found if found.simulated else _timed(asked, layout)
        if its.fits and its.step_s < found.step_s:
            more.append((better, its))
    return sorted(more, key=lambda pair: pair[1].step_s)


def _unrefined(layout: Layout) -> Layout:
    """The layout as it was before its cut into stages and its buckets were chosen."""
    return replace(layout, layers_per_stage=(), bucket_mb=BUCKET_MB)


def _simulate(rows: Columns, times: StepTime, layouts: list[Layout], chosen: list[int]) -> dict[int, float]:
    """Bubbles by row, in the order of the closed form until the allowance of steps is spent."""
    bubbles, left, made = {}, float(_SIMULATED_STEPS), set[TableKey]()
    for i in chosen:
        cost = simulation_cost(rows, i, made)
        if layouts[i].pp == 1 or cost > left:
            continue
        left -= cost
        made.add(table_key(rows, i))
        bubbles[i] = simulated_bubble(rows, times, i, layouts[i])
    return bubbles


def different(plans: Iterable[Plan]) -> Iterator[Plan]:
    """Of plans that are equal in all numbers the first alone: with one micro-batch 1F1B and GPipe are the same work."""
    seen = set[tuple[str, ...]]()
    for plan in plans:
        its = plan.prediction
        numbers = (its.step_s, its.memory_gb, *its.parts.values(), *its.memory_parts.values(), *its.stage_memory_gb)
        if (shown := tuple(f"{number:.6g}" for number in numbers)) not in seen:
            seen.add(shown)
            yield plan


def compared(plan: Plan, best: Plan) -> Plan:
    """The plan with the reasons why it is slower than the best: the parts that grew most."""
    mine, its = plan.prediction, best.prediction
    change = {name: mine.parts[name] - its.parts[name] for name in mine.parts}
    grown = sorted(change.items(), key=lambda item: -item[1])
    worth = 0.001 * its.step_s
    reasons = [f"{name} +{value:.3g} s" for name, value in grown if value > worth][:3]
    saved = [f"{name} {value:.3g} s" for name, value in reversed(grown) if value < -worth][:2]
    text = f"{100 * (mine.step_s / its.step_s - 1):.1f} % slower"
    text += f": {', '.join(reasons)}" if reasons else ""
    text += f" (gains {', '.join(saved)})" if saved else ""
    if not reasons and not saved:
        text += f": as fast, with {_instead(plan.layout, best.layout)}"
    return replace(plan, worse=text)


def _instead(mine: Layout, its: Layout) -> str:
    """In what two layouts differ, in words."""
    pairs = [(field.name, getattr(mine, field.name), getattr(its, field.name)) for field in fields(Layout)]
    return ", ".join(f"{name} {ours} instead of {theirs}" for name, ours, theirs in pairs if ours != theirs)
