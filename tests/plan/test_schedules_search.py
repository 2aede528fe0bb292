"""The search for a table: against brute force, named schedules and the cap."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.parallel.schedules import ScheduleError, Step, Table, check
from lockstep.plan import StageTimes, schedule, search_schedule, simulate
from lockstep.plan.list_schedule import Rule, Shape, list_schedule
from lockstep.plan.schedule_program import best_table

numbers = st.integers(1, 12).map(lambda n: n / 4)


def orders(kinds: str, m: int, done: tuple[int, ...] = (0, 0, 0)):
    """Every order of one device's steps that its own dependencies allow, micro-batches in their order."""
    if done == (m, m, m):
        yield ()
        return
    for k in range(3):
        if done[k] < m and (k == 0 or done[k] < done[k - 1]):
            following = tuple(n + (i == k) for i, n in enumerate(done))
            for rest in orders(kinds, m, following):
                yield (Step(kinds[k], done[k]), *rest)


def brute_force(times: StageTimes, comm: float, cap: float, metric: str) -> float:
    best = float("inf")
    for rows in itertools.product(list(orders("FBW", 2)), repeat=3):
        try:
            run = simulate(Table("all", 3, 2, 1, "loop", rows), times, comm)
        except ScheduleError:
            continue
        if run.peak_activation <= cap:
            best = min(best, getattr(run, metric))
    return best


@settings(max_examples=6, deadline=None)
@given(
    times=st.lists(st.tuples(numbers, numbers, numbers), min_size=3, max_size=3),
    cap=st.integers(1, 2),
    metric=st.sampled_from(["max_span", "makespan"]),
)
def test_integer_program_finds_the_best(times, cap, metric):
    stage_times = StageTimes(*(list(column) for column in zip(*times, strict=True)))
    shape = Shape(3, 2, 1, "loop", stage_times, 0.25, [cap] * 3, 1.0)
    table = best_table(shape, 200.0, 200.0, metric, seconds=20)
    assert table is not None
    run = simulate(check(table), stage_times, 0.25)
    assert run.peak_activation <= cap
    # HiGHS keeps constraints to about 1e-6, and times are quarters.
    assert getattr(run, metric) == pytest.approx(brute_force(stage_times, 0.25, cap, metric), abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(
    times=st.lists(st.tuples(numbers, numbers, numbers), min_size=2, max_size=4),
    m=st.integers(1, 8),
    cap=st.integers(1, 6),
    m_w=st.sampled_from([0.5, 1.0]),
)
def test_obeys_the_cap_and_is_no_worse_than_a_named_schedule(times, m, cap, m_w):
    p, stage_times = len(times), StageTimes(*(list(column) for column in zip(*times, strict=True)))
    found = search_schedule(p, m, stage_times, 0.25, cap, m_w=m_w, seconds=0)
    run = simulate(check(found), stage_times, 0.25, m_w=m_w)
    assert run.peak_activation <= cap * (1 + 1e-9)
    for name in ("1f1b", "zb-h1", "zb-h2", "zb-1p"):
        named = simulate(schedule(name, p, m, stage_times, 0.25, m_w=m_w), stage_times, 0.25, m_w=m_w)
        if named.peak_activation <= cap:
            assert run.max_span <= named.max_span


def test_uneven_stages_are_better_than_with_any_fixed_order():
    times = StageTimes([1, 1.5, 2, 1], [1, 2, 2.5, 1], [0.5, 1, 2, 0.5])
    found = simulate(search_schedule(4, 8, times, 0.1, 3, seconds=0.5), times, 0.1)
    assert found.peak_activation <= 3
    fitting = [simulate(schedule("zb-1p", 4, 8, times, 0.1, activation_cap=3, m_w=1.0), times, 0.1)]
    assert found.max_span < min(run.max_span for run in fitting)


def test_polishing_helps():
    times = StageTimes([1, 2, 1], [1, 2, 1], [1, 2, 1])
    rough = simulate(search_schedule(3, 4, times, 0.1, 3, seconds=0), times, 0.1).max_span
    fine = simulate(search_schedule(3, 4, times, 0.1, 3, seconds=6), times, 0.1).max_span
    assert fine <= rough
    assert fine == pytest.approx(24.0)  # the busiest device's work: nothing is shorter


def test_two_chunks_are_placed_as_a_v():
    found = search_schedule(3, 6, StageTimes([[1, 2]] * 3, 1, 1), 0.1, seconds=0, chunks=2)
    assert (found.placement, found.chunks) == ("v", 2)
    assert simulate(found, StageTimes([[1, 2]] * 3, 1, 1), 0.1).peak_activation <= 3


@pytest.mark.parametrize("rule", [Rule(0, False, 0.0), Rule(2, True, 1.0), Rule(-1, False, 0.5)])
def test_list_schedules_are_valid(rule):
    shape = Shape(4, 9, 1, "loop", StageTimes([1, 2, 3, 1], 2, 1), 0.5, [3, 3, 2, 1], 0.5)
    table = list_schedule(shape, rule)
    assert table is not None
    run = simulate(check(table), shape.times, 0.5, m_w=0.5)
    assert all(peak <= cap for peak, cap in zip(run.peaks, shape.cap, strict=True))


def test_rules_make_different_tables():
    shape = Shape(4, 9, 1, "loop", StageTimes([1, 2, 3, 1], 2, 2), 0.5, [6] * 4, 1.0)
    tables = [list_schedule(shape, Rule(*r)) for r in ((0, False, 0), (2, False, 0), (2, True, 0), (2, True, 1.0))]
    assert len({table.rows for table in tables}) == len(tables)


def test_wrong_requests():
    unit = StageTimes(1, 1, 1)
    with pytest.raises(ScheduleError, match=r"fits activation_cap 0\.5"):
        search_schedule(2, 4, unit, 0.0, 0.5)
    with pytest.raises(ScheduleError, match="use max_span or makespan"):
        search_schedule(2, 4, unit, metric="span")
    with pytest.raises(ScheduleError, match="chunks is 3"):
        search_schedule(2, 4, unit, chunks=3)
