"""The balance: against the published golden problem, brute force on small ones, and its errors."""

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import LockstepError
from lockstep.plan import StageTimes, balance, schedule, simulate
from lockstep.plan.balance import Balance
from lockstep.plan.balance_exact import ExactBalance
from lockstep.plan.balance_problem import BalanceProblem, End, Keep, Layers, in_flight
from lockstep.plan.balance_program import solve

GOLDEN = json.loads((Path(__file__).parents[1] / "oracles" / "balance_golden.json").read_text())
GB = 1e9


def problem(**changes) -> BalanceProblem:
    layers = (Layers("dense", 8, 1 * GB, (Keep("none", 1, 2, 1 * GB), Keep("full", 1, 3, 0.1 * GB))),)
    return replace(BalanceProblem(4, 8, layers, memory_limit=12 * GB), **changes)


def test_golden_is_met_within_a_second():
    begin = time.process_time()  # other processes must not fail this
    found = balance(GOLDEN)
    assert found.makespan <= 110_610
    assert time.process_time() - begin < 1.0
    assert sum(found.layers) == GOLDEN["body"]["layers"]
    assert max(found.peaks) <= GOLDEN["memory_limit_mb"] * 1e6


def test_conventions_are_those_of_the_published_solution():
    published = GOLDEN["published"]
    counts = [6 + o for o in published["layers_per_stage_offset_from_6"]]
    full = published["full_recompute_layers"]
    fixed = replace(BalanceProblem.from_dict(GOLDEN))
    theirs = Balance(fixed, tuple(((n - r, r),) for n, r in zip(counts, full, strict=True)))
    assert theirs.makespan == published["makespan"]
    assert [round(peak / 1e6) for peak in theirs.peaks] == published["stage_peaks_mb"]


@settings(max_examples=15, deadline=None)
@given(
    limit=st.floats(4, 14),
    head=st.floats(0, 3),
    tail=st.floats(0, 3),
    extra=st.floats(0.1, 2),
    micro_batches=st.integers(3, 8),
)
def test_no_cut_is_better(limit, head, tail, extra, micro_batches):
    keeps = (Keep("none", 1, 2, 1 * GB), Keep("full", 1, 2 + extra, 0.1 * GB))
    small = BalanceProblem(
        3, micro_batches, (Layers("dense", 6, 1 * GB, keeps),), limit * GB, End(head), End(tail, 0.5 * GB)
    )
    best = brute_force(small)
    if best is None:
        with pytest.raises(LockstepError, match="GB more"):
            balance(small)
    else:
        assert balance(small).objective == pytest.approx(best)


@settings(max_examples=12, deadline=None)
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    limit=st.floats(6, 20),
    tail=st.floats(0, 3),
    min_layers=st.integers(0, 1),
)
def test_exact_and_integer_program_agree(counts, limit, tail, min_layers):
    ways = (Keep("none", 1, 2, 1 * GB), Keep("half", 1, 2.3, 0.6 * GB), Keep("full", 1, 3, 0.1 * GB))
    kinds = [Layers("dense", 1, 1 * GB, ways), Layers("moe", 1, 1.5 * GB, ways[::2])]
    layers = tuple(replace(kinds[i % 2], count=count) for i, count in enumerate((*counts, 3)))
    small = BalanceProblem(3, 5, layers, limit * GB, tail=End(tail, 1 * GB), min_layers=min_layers)
    program = solve(small)
    if program is None:
        with pytest.raises(LockstepError, match="GB more"):
            balance(small)
        excess = solve(small, elastic=True).excess
        assert ExactBalance(small).nearest()[1] == pytest.approx(excess, rel=1e-5, abs=1e-6 * limit * GB)
        return
    found, theirs = balance(small), Balance(small, program.counts)
    assert max(found.peaks) <= small.memory_limit * (1 + 1e-9)
    # HiGHS stops within its relative gap of 1e-4.
    assert found.objective == pytest.approx(theirs.objective, rel=1e-4)


def test_large_and_irregular_problems_are_exact_and_quick():
    ways = (Keep("none", 1, 2, 0.5 * GB), Keep("selective", 1, 2.2, 0.3 * GB), Keep("full", 1, 3, 0.05 * GB))
    dense, moe = Layers("dense", 1, 1 * GB, ways), Layers("moe", 1, 3 * GB, ways)
    begin = time.process_time()
    found = balance(BalanceProblem(16, 64, (Layers("dense", 126, 1.2 * GB, ways),), 45 * GB, End(0.5), End(2, 4 * GB)))
    assert found.gap == 0
    assert sum(found.layers) == 126
    mixed = balance(BalanceProblem(8, 32, (dense, moe) * 24, 60 * GB, End(0.5), End(2, 4 * GB)))
    assert sum(mixed.layers) == 48
    assert time.process_time() - begin < 2.0


def test_interleaved_groups_are_even():
    found = balance(
        problem(layers=(Layers("dense", 24, 1 * GB, (Keep("none", 1, 2, 0.1 * GB),)),), memory_limit=30 * GB)
    )
    assert found.layers == [6, 6, 6, 6]
    run = replace(found.problem, schedule="interleaved", chunks=2)
    assert balance(run).layers == [3] * 8


def brute_force(small: BalanceProblem) -> float | None:
    n, best = small.layers[0].count, None
    for a, b in itertools.product(range(1, n), repeat=2):
        if a + b >= n:
            continue
        cut = (a, b, n - a - b)
        for full in itertools.product(*(range(k + 1) for k in cut)):
            tried = Balance(small, tuple(((k - r, r),) for k, r in zip(cut, full, strict=True)))
            if max(tried.peaks) <= small.memory_limit and (best is None or tried.objective < best):
                best = tried.objective
    return best


def test_more_memory_means_less_recompute():
    tight, wide = balance(problem(memory_limit=4 * GB)), balance(problem(memory_limit=40 * GB))
    assert sum(tight.kept("full")) > 0 == sum(wide.kept("full"))
    assert tight.makespan > wide.makespan


def test_unequal_runs_are_cut_in_order():
    dense = Layers("dense", 3, 1 * GB, (Keep("none", 1, 2, 0.1 * GB),))
    moe = Layers("moe", 9, 2 * GB, (Keep("none", 3, 6, 0.1 * GB), Keep("full", 3, 9, 0.0)))
    found = balance(problem(layers=(dense, moe), memory_limit=30 * GB))
    seen = [[sum(run) for run in group] for group in found.counts]
    assert [sum(run) for run in zip(*seen, strict=True)] == [3, 9]
    first_moe = next(i for i, group in enumerate(seen) if group[1])
    assert all(group[0] == 0 for group in seen[first_moe + 1 :])
    assert found.layers[0] > found.layers[-1]  # dense layers are cheaper


def test_offload_is_one_more_way_to_keep():
    keeps = (Keep("none", 1, 2, 1 * GB), Keep("full", 1, 3, 0.1 * GB), Keep("offload", 1, 2.2, 0.0))
    layers = (Layers("dense", 8, 1 * GB, keeps),)
    found = balance(problem(layers=layers, memory_limit=4 * GB))
    assert sum(found.kept("offload")) > 0 == sum(found.kept("full"))


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("zb-h2", 1), ("interleaved", 2), ("zb-v", 2), ("v-half", 2)]
)
def test_peaks_are_those_of_the_simulated_schedule(name, chunks):
    found = balance(problem(schedule=name, chunks=chunks, memory_limit=30 * GB))
    table, keep = schedule(name, 4, 8, chunks=chunks), found.problem.layers[0].keeps[0]
    grid = [[found.layers[table.group(s, c)] * keep.activation for c in range(chunks)] for s in range(4)]
    run = simulate(table, StageTimes(1, 1, 1), m_b=grid)
    weights = [sum(found.layers[table.group(s, c)] for c in range(chunks)) * 1 * GB for s in range(4)]
    assert sum(found.kept("full")) == 0
    assert found.peaks == pytest.approx([p + w for p, w in zip(run.peaks, weights, strict=True)])


def test_in_flight_of_1f1b():
    assert in_flight(schedule("1f1b", 4, 8)) == [[(4,)], [(3,)], [(2,)], [(1,)]]


def test_infeasible_says_by_how_much_and_what_would_fit():
    with pytest.raises(LockstepError) as error:
        balance(problem(memory_limit=2.35 * GB))
    text = str(error.value)
    # Two layers of weights and four micro-batches of recomputed activations: 2 + 2 x 4 x 0.1 = 2.8 GB on device 0 ...
    # ... but three layers fit nowhere else, so two per stage is the only near cut.
    assert "0.45 GB more, on device 0" in text
    assert "Any one of these fits" in text
    assert "8 stages" in text
    fitting = balance(problem(memory_limit=2.35 * GB, stages=8))
    assert max(fitting.peaks) <= 2.35 * GB


def test_weights_that_do_not_fit_are_named():
    with pytest.raises(LockstepError, match="Weights and optimizer state alone do not fit"):
        balance(problem(memory_limit=1.5 * GB))


def test_too_few_layers():
    with pytest.raises(LockstepError, match="at most 4 stages"):
        problem(stages=5, chunks=2)
    assert problem(stages=8, min_layers=1).groups == 8
    with pytest.raises(LockstepError, match="at most 4 stages"):
        problem(stages=8, min_layers=2)
