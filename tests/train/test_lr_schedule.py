"""Schedules against their closed forms."""

from __future__ import annotations

import math

import pytest

from lockstep.config import ScheduleConfig
from lockstep.errors import LockstepError
from lockstep.train.schedule import check_schedule, lengths, lr_factor


def test_warm_up_is_linear_and_ends_at_one() -> None:
    schedule = ScheduleConfig(warmup_steps=4)
    assert [lr_factor(schedule, s, 100) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_cosine() -> None:
    schedule = ScheduleConfig(kind="cosine", warmup_steps=10, final=0.1)
    assert lr_factor(schedule, 10, 111) == 1.0
    assert lr_factor(schedule, 60, 111) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 50 / 100)))
    assert lr_factor(schedule, 110, 111) == pytest.approx(0.1)
    assert lr_factor(schedule, 500, 111) == pytest.approx(0.1)


def test_wsd() -> None:
    schedule = ScheduleConfig(kind="wsd", warmup_steps=2, decay_steps=5, final=0.5)
    factors = [lr_factor(schedule, s, 12) for s in range(12)]
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5])


def test_constant() -> None:
    schedule = ScheduleConfig(kind="constant", warmup_steps=0)
    assert {lr_factor(schedule, s, 7) for s in range(7)} == {1.0}


@pytest.mark.parametrize(
    ("steps", "expected"), [(1, (0, 0)), (10, (1, 1)), (100, (10, 16)), (300, (20, 50)), (9000, (20, 50))]
)
def test_lengths_that_are_not_given_follow_the_run(steps: int, expected: tuple[int, int]) -> None:
    schedule = ScheduleConfig(kind="wsd")
    assert lengths(schedule, steps) == expected
    check_schedule(schedule, steps)
    given = ScheduleConfig(kind="wsd", warmup_steps=expected[0], decay_steps=expected[1])
    assert [lr_factor(schedule, s, steps) for s in range(steps)] == [lr_factor(given, s, steps) for s in range(steps)]


def test_a_schedule_longer_than_the_run_is_refused() -> None:
    with pytest.raises(LockstepError, match=r"25 steps \(schedule.warmup_steps 20 \+ schedule.decay_steps 5\)"):
        check_schedule(ScheduleConfig(kind="wsd", warmup_steps=20, decay_steps=5), 24)
    with pytest.raises(LockstepError, match=r"train\.steps is 5"):
        check_schedule(ScheduleConfig(warmup_steps=6), 5)
    check_schedule(ScheduleConfig(warmup_steps=5), 5)
