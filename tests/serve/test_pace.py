"""Rows of a step by the time that steps took, on machines that are formulas."""

from __future__ import annotations

import pytest

from lockstep.serve.pace import Pace


def run(pace: Pace, base: float, row: float, steps: int) -> int:
    """Full steps on a machine that takes `base` seconds and `row` for every row; the rows of the next one."""
    for _ in range(steps):
        pace.ran(pace.rows, base + row * pace.rows)
    return pace.rows


@pytest.mark.parametrize(
    ("base", "row", "right"),
    [(0.02, 0.0024, 54), (0.0, 0.001, 150), (0.3, 0.05, 32), (0.0, 0.0001, 256), (0.1, 0.00001, 256)],
)
def test_full_steps_come_to_take_the_time_they_may(base, row, right):
    assert run(Pace(0.15, 256), base, row, 40) == pytest.approx(right, abs=1)


def test_a_stall_decides_little_and_is_soon_forgotten():
    pace = Pace(0.15, 256)
    usual = run(pace, 0.02, 0.0024, 40)
    pace.ran(pace.rows, 5.0)
    assert pace.rows > 0.6 * usual
    assert run(pace, 0.02, 0.0024, 6) > 0.9 * usual


def test_small_steps_say_nothing_of_large_ones_unless_they_take_too_long():
    pace = Pace(0.15, 256)
    for _ in range(100):
        pace.ran(8, 0.03)
    assert pace.rows == 64
    for _ in range(100):
        pace.ran(8, 1.0)
    assert pace.rows == 32


def test_it_stays_within_a_small_budget():
    assert run(Pace(0.15, 20), 0.0, 0.1, 50) == run(Pace(0.15, 20), 0.0, 0.00001, 50) == 20
