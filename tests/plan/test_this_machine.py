"""The efficiency curve of a measured machine (the measuring itself: tests/train/test_planned_and_measured.py, slow)."""

import pytest

from lockstep.plan.this_machine import _curve


def test_curve_is_recovered():
    rates = {depth: 5e9 * depth / (depth + 96) for depth in (64, 128, 256, 512, 1024)}
    half, best = _curve(rates)
    assert half == pytest.approx(96)
    assert best == pytest.approx(5e9)


def test_rates_that_fall_with_depth_give_no_negative_depth():
    half, best = _curve({64: 6e9, 128: 5e9, 256: 4e9})
    assert half == 0.0
    assert best > 0
