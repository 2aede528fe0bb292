"""The balance against every cut and every way to keep, written anew from the statement of the problem."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import LockstepError
from lockstep.plan import balance
from lockstep.plan.balance import Balance
from lockstep.plan.balance_problem import BalanceProblem, End, Keep, Layers

quarters = st.integers(0, 12).map(lambda n: n / 4)  # sums of them are exact


@st.composite
def kinds(draw: st.DrawFn) -> Layers:
    """A run of up to three layers that can be kept in up to three ways."""
    ways = [
        Keep(f"way{i}", draw(quarters) + 0.25, draw(quarters), draw(quarters), draw(quarters))
        for i in range(draw(st.integers(1, 3)))
    ]
    return Layers("run", draw(st.integers(1, 3)), draw(quarters), tuple(ways))


@st.composite
def problems(draw: st.DrawFn) -> BalanceProblem:
    layers = tuple(draw(st.lists(kinds(), min_size=1, max_size=3)))
    depth = sum(run.count for run in layers)
    stages = draw(st.integers(1, min(4, depth)))
    head, tail = (End(draw(quarters), draw(quarters)) for _ in range(2))
    limit, micro_batches = draw(st.integers(8, 90)) / 4, draw(st.integers(1, 6))
    return BalanceProblem(stages, micro_batches, layers, limit, head, tail, min_layers=draw(st.integers(0, 1)))


def least(problem: BalanceProblem) -> float | None:
    """(m - 1) x slowest stage + the sum of all, over every cut; a stage of a cut takes its quickest way that fits."""
    each = [run for run in problem.layers for _ in range(run.count)]
    best = None
    for inner in itertools.product(range(len(each) + 1), repeat=problem.stages - 1):
        cuts = (0, *inner, len(each))
        pairs = list(itertools.pairwise(cuts))
        if any(b - a < problem.min_layers for a, b in pairs):
            continue
        times = [quickest(problem, stage, each[a:b]) for stage, (a, b) in enumerate(pairs)]
        if None in times:
            continue
        value = (problem.micro_batches - 1) * max(times) + sum(times)
        best = value if best is None else min(best, value)
    return best


def quickest(problem: BalanceProblem, stage: int, mine: list[Layers]) -> float | None:
    """Seconds of a micro-batch on a stage of 1F1B with these layers; None if no way to keep them fits."""
    flying = min(problem.micro_batches, problem.stages - stage)
    ends = [end for end, there in ((problem.head, stage == 0), (problem.tail, stage == problem.stages - 1)) if there]
    found = []
    for ways in itertools.product(*(run.keeps for run in mine)):
        held = sum(run.parameters for run in mine) + sum(end.memory for end in ends)
        if held + flying * sum(way.activation for way in ways) <= problem.memory_limit:
            found.append(sum(w.forward + w.backward + w.weight for w in ways) + sum(3 * end.time for end in ends))
    return min(found, default=None)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_no_cut_and_no_way_is_better(problem: BalanceProblem) -> None:
    best = least(problem)
    if best is None:
        with pytest.raises(LockstepError, match="more, on"):
            balance(problem)
        return
    found = balance(problem)
    assert found.objective == pytest.approx(best, rel=1e-9)
    assert max(found.peaks) <= problem.memory_limit * (1 + 1e-9)
    assert balance(problem).counts == found.counts, "the same answer every time"


@settings(max_examples=25, deadline=None)
@given(problems(), st.integers(1, 40))
def test_more_memory_is_never_slower(problem: BalanceProblem, more: int) -> None:
    try:
        tight = balance(problem)
    except LockstepError:
        return
    wide = balance(replace(problem, memory_limit=problem.memory_limit + more / 4))
    assert wide.objective <= tight.objective * (1 + 1e-9)


@settings(max_examples=8, deadline=None)
@given(
    count=st.integers(4, 6),
    limit=st.integers(12, 40).map(lambda n: n / 2),
    tail=quarters,
    schedule=st.sampled_from(["interleaved", "zb-v"]),
)
def test_several_chunks_against_every_cut(count: int, limit: float, tail: float, schedule: str) -> None:
    ways = (Keep("none", 1.0, 1.0, 1.0, 1.0), Keep("full", 1.0, 2.0, 0.25, 1.0))
    layers = (Layers("dense", count, 1.0, ways),)
    problem = BalanceProblem(2, 4, layers, limit, tail=End(tail), schedule=schedule, chunks=2)
    cuts = [cut for cut in itertools.product(range(1, count), repeat=4) if sum(cut) == count]
    tried = [
        Balance(problem, tuple(((n - again, again),) for n, again in zip(cut, full, strict=True)))
        for cut in cuts
        for full in itertools.product(*(range(n + 1) for n in cut))
    ]
    fitting = [one.objective for one in tried if max(one.peaks) <= limit]
    if not fitting:
        with pytest.raises(LockstepError, match="more, on"):
            balance(problem)
        return
    found = balance(problem)
    assert max(found.peaks) <= limit * (1 + 1e-9)
    assert found.objective == pytest.approx(min(fitting), rel=2e-4)  # HiGHS stops within its relative gap of 1e-4
