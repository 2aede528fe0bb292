"""Rows of a step by the time that steps took, on machines that are formulas."""

from __future__ import annotations

import pytest

from lockstep.serve.pace import Pace


def run(pace: Pace, base: float, row: float, steps: int) -> list[int]:
    """Full steps on a machine that takes `base` seconds and `row` for every row; the rows of each."""
    sizes = []
    for _ in range(steps):
        sizes.append(pace.rows)
        pace.ran(pace.rows, base + row * pace.rows)
    return sizes


@pytest.mark.parametrize(("base", "row"), [(0.02, 0.0024), (0.3, 0.05), (0.0, 0.0001), (0.1, 0.00001)])
def test_full_steps_come_to_take_the_time_they_may(base, row):
    pace = Pace(0.15, 256)
    sizes = run(pace, base, row, 40)
    right = (0.15 - base) / row
    assert sizes[-1] == pytest.approx(min(max(right, 1), 256), abs=2)
    assert max(sizes[-10:]) - min(sizes[-10:]) <= 1, "it rests there"


def test_a_slow_step_counts_at_once_and_a_stall_is_soon_forgotten():
    pace = Pace(0.15, 256)
    pace.ran(200, 3.0)
    assert pace.rows == 10
    usual = run(Pace(0.15, 256), 0.02, 0.0024, 40)[-1]
    pace = Pace(0.15, 256)
    run(pace, 0.02, 0.0024, 40)
    pace.ran(pace.rows, 0.6)
    assert pace.rows < usual / 3
    assert run(pace, 0.02, 0.0024, 5)[-1] > 0.8 * usual


def test_small_steps_say_nothing_of_large_ones():
    pace = Pace(0.15, 256)
    for _ in range(100):
        pace.ran(8, 0.03)
    assert pace.rows == 64
