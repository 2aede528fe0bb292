"""What a run tells of its speed: steps that compile say nothing of those to come."""

import pytest

from lockstep.config.train import TrainConfig
from lockstep.train.resume import Position
from lockstep.train.speed import Speed


def test_steps_that_compile_do_not_count_for_the_time_left() -> None:
    speed, at, told = Speed(TrainConfig(steps=10), ranks=0), Position(), []
    for seconds in (5.0, 30.0, 1.0, 1.0):
        at = at.after(100, 2.0)
        told.append(speed.line(at, 2.0, 100, 1.0, seconds))
    assert [line.seconds_left for line in told] == [None, None, 7.0, 6.0]
    assert [line.tokens_per_second for line in told[2:]] == [100.0, 100.0]


def test_steps_are_smoothed_from_then_on() -> None:
    speed, at = Speed(TrainConfig(steps=10), ranks=0), Position()
    for seconds in (1.0, 1.0, 1.0, 2.0):
        at = at.after(100, 2.0)
        line = speed.line(at, 2.0, 100, 1.0, seconds)
    assert line.tokens_per_second == pytest.approx((0.9 * 100 + 100) / (0.9 * 1.0 + 2.0))
