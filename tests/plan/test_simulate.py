"""The simulator: hand-computed cases, invariants for any schedule and times, and its errors."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.parallel.schedules import NAMES, ScheduleError, Step, Table, check, messages
from lockstep.plan import StageTimes, schedule, simulate

numbers = st.integers(1, 12).map(lambda n: n / 4)  # quarters: sums are exact


@st.composite
def runs(draw):
    """Any schedule of any size, with times per device and chunk."""
    name, p, m = draw(st.sampled_from(NAMES)), draw(st.integers(1, 5)), draw(st.integers(1, 11))
    chunks = draw(st.integers(1, 3)) if name == "interleaved" else None
    v = chunks or (2 if name in ("zb-v", "v-half", "v-min", "dualpipe-v") else 1)
    grids = st.lists(st.lists(numbers, min_size=v, max_size=v), min_size=p, max_size=p)
    times = StageTimes(draw(grids), draw(grids), draw(grids))
    comm = draw(st.sampled_from([0.0, 0.25, 1.5]))
    return schedule(name, p, m, times, comm, chunks), times, comm


@settings(max_examples=120, deadline=None)
@given(runs())
def test_invariants(case):
    table, times, comm = case
    check(table)
    got = simulate(table, times, comm)
    assert got.makespan >= got.max_span >= got.ideal
    assert got.makespan >= critical_path(table, times, comm)
    assert got.makespan <= sequential(table, times, comm)
    for device, row in enumerate(table.rows):
        start, end = got.start[device], got.end[device]
        assert (start[1:] >= end[:-1]).all(), "a device does one step at a time"
        assert len(start) == len(row)
    for channel in messages(table).values():
        for m in channel:
            assert got.start[m.receiver][m.before] >= got.end[m.sender][m.after] + comm
    assert all(peak <= table.micro_batches for peak in got.peaks)
    assert all(np.isclose(np.array(h), np.round(np.array(h) * table.chunks) / table.chunks).all() for h in got.held)


@settings(max_examples=60, deadline=None)
@given(runs())
def test_every_time_and_every_byte_is_that_of_an_event_loop(case):
    table, times, comm = case
    got, (start, end, most) = simulate(table, times, comm), event_loop(table, times, comm)
    for device, row in enumerate(table.rows):
        assert got.start[device].tolist() == [start[device, i] for i in range(len(row))]
        assert got.end[device].tolist() == [end[device, i] for i in range(len(row))]
    assert got.peaks == pytest.approx(most)


def event_loop(table, times, comm):
    """Devices that wake up when a step ends or a message comes, and look whether they can go on: starts and ends by
    (device, position), and the most activations that each held."""
    f, b, w = times.grids(table.stages, table.chunks)
    ended, start, end = {}, {}, {}  # ended: (kind of message, micro-batch, group) -> (device, time)
    at, free = [0] * table.stages, [0.0] * table.stages
    holding, most = [0.0] * table.stages, [0.0] * table.stages
    clock = [(0.0, device) for device in range(table.stages)]
    while clock:
        now, device = heapq.heappop(clock)
        row = table.rows[device]
        if at[device] == len(row) or free[device] > now:
            continue
        step = row[at[device]]
        came = [
            ended[key][1] + (comm if ended[key][0] != device else 0.0) if key in ended else np.inf
            for part in step.parts
            for key in needed(table, part, table.group(device, part.chunk))
        ]
        if any(time > now for time in came):
            continue  # whoever sends it wakes this device when it has come
        took = {"F": f, "B": b, "W": w}
        length = sum(took[kind][device][part.chunk] for part in step.parts for kind in part.kind)
        length *= times.overlapped if step.partner else 1.0
        start[device, at[device]], end[device, at[device]] = now, now + length
        holding[device] += sum(1 / table.chunks for part in step.parts if part.kind == "F")
        most[device] = max(most[device], holding[device])
        holding[device] -= sum(1 / table.chunks for part in step.parts if "W" in part.kind)
        at[device], free[device] = at[device] + 1, now + length
        for part in step.parts:
            for kind in set(part.kind) & set("FB"):
                ended[kind, part.micro_batch, table.group(device, part.chunk)] = (device, now + length)
        for other in range(table.stages):
            heapq.heappush(clock, (now + length + (comm if other != device else 0.0), other))
    assert all(at[device] == len(row) for device, row in enumerate(table.rows))
    return start, end, most


def needed(table, part, group):
    """The steps whose results a plain step takes."""
    if part.kind == "F":
        return [("F", part.micro_batch, group - 1)] if group else []
    if part.kind == "W":
        return [("B", part.micro_batch, group)]
    above = [("B", part.micro_batch, group + 1)] if group + 1 < table.groups else []
    return [("F", part.micro_batch, group), *above]


def critical_path(table, times, comm) -> float:
    """One micro-batch through all groups and back: no schedule is shorter."""
    f, b, _ = times.grids(table.stages, table.chunks)
    total, last = 0.0, None
    for group in range(table.groups):
        s, c = table.holder(group)
        total += f[s][c] + b[s][c] + (2 * comm if last not in (None, s) else 0.0)
        last = s
    return total


def sequential(table, times, comm) -> float:
    """Everything one after the other, with every message waited for: no sensible simulation is longer."""
    work = sum(sum(map(sum, grid)) for grid in times.grids(table.stages, table.chunks)) * table.micro_batches
    return work + comm * sum(map(len, messages(table).values()))


@settings(max_examples=40, deadline=None)
@given(
    cap=st.integers(1, 9),
    p=st.integers(1, 5),
    m=st.integers(1, 10),
    times=st.tuples(numbers, numbers, numbers),
    m_w=st.sampled_from([0.25, 0.5, 1.0]),
)
def test_greedy_obeys_any_cap(cap, p, m, times, m_w):
    unit = StageTimes(*times)
    table = schedule("zb-1p", p, m, unit, 0.25, activation_cap=cap, m_w=m_w)
    assert simulate(table, unit, 0.25, m_w=m_w).peak_activation <= cap * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(p=st.integers(2, 5), m=st.integers(1, 12), times=st.tuples(numbers, numbers, numbers))
def test_zb_v_needs_no_more_than_1f1b_and_is_no_slower_by_hand(p, m, times):
    chunk = StageTimes(*times)
    table = schedule("zb-v", p, m, chunk)
    assert simulate(table, chunk).peak_activation <= p
    assert simulate(table, chunk).max_span <= simulate(schedule("zb-v", p, m), chunk).max_span


def test_by_hand():
    table = Table("hand", 2, 1, 1, "loop", ((Step("F", 0), Step("BW", 0)), (Step("F", 0), Step("B", 0), Step("W", 0))))
    got = simulate(table, StageTimes([1, 2], [4, 8], [16, 32]), comm=0.5)
    # F0 on device 0 until 1, its message until 1.5, F until 3.5, B until 11.5, W until 43.5; back at 12, BW until 32.
    assert got.end[0].tolist() == [1.0, 32.0]
    assert got.end[1].tolist() == [3.5, 11.5, 43.5]
    assert (got.makespan, got.max_span, got.spans) == (43.5, 42.0, (32.0, 42.0))
    assert (got.busy, got.ideal, got.bubble_rate) == ((21.0, 42.0), 42.0, 0.0)
    assert [str(event.step) for event in got.events] == ["F0", "F0", "B0", "W0", "BW0"]


def test_latency_per_pair_of_devices():
    table = schedule("1f1b", 3, 1)
    far = [[0, 1, 0], [2, 0, 3], [0, 4, 0]]
    assert simulate(table, StageTimes(1, 1, 1), far).makespan == 3 * 3 + 1 + 3 + 4 + 2
    with pytest.raises(ScheduleError, match="comm has 2 rows"):
        simulate(table, StageTimes(1, 1, 1), [[0, 0], [0, 0]])


def test_memory_rules():
    table = schedule("zb-h2", 4, 8)
    unit = StageTimes(1, 1, 1)
    assert simulate(table, unit).peaks == (7, 7, 7, 7)
    half = simulate(table, unit, m_b=10.0, m_w=5.0)
    assert half.peak_activation <= simulate(table, unit, m_b=10.0).peak_activation == 70
    per_device = simulate(table, unit, m_b=[1, 2, 3, 4])
    assert per_device.peaks == tuple(n * x for n, x in zip((1, 2, 3, 4), simulate(table, unit).peaks, strict=True))


def test_gradient_split_frees_the_input_part_at_once():
    row = (Step("F", 0), Step("B", 0), Step("F", 1), Step("B", 1), Step("W", 0), Step("W", 1))
    table = Table("hand", 1, 2, 1, "loop", (row,))
    assert simulate(table, StageTimes(1, 1, 1), m_w=0.25).held[0].tolist() == [1.0, 1.0, 1.25, 1.25, 0.5, 0.25]


def test_wrong_times():
    table = schedule("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match=r"times\.b has 3 rows.*2 numbers"):
        simulate(table, StageTimes(1, [1, 2, 3], 1))
    with pytest.raises(ScheduleError, match="give a finite number of at least 0"):
        simulate(table, StageTimes(-1, 1, 1))
    with pytest.raises(ScheduleError, match="comm is -1"):
        simulate(table, StageTimes(1, 1, 1), -1)
