"""When an engine that does not answer is given up."""

from __future__ import annotations

import os
import time

from lockstep.serve.heartbeat import BEATS, Heartbeat, processor_seconds


def beats_until_given_up(computes: float, answers_every: int = 0) -> int | None:
    heart, computed = Heartbeat(), 1.0
    for beat in range(1, 1000):
        if heart.beat(computed):
            return beat
        computed += computes
        if answers_every and beat % answers_every == 0:
            heart.answered()
    return None


def test_one_that_neither_answers_nor_computes_is_given_up():
    assert beats_until_given_up(computes=0.0) in (BEATS + 1, BEATS + 2)


def test_one_that_computes_has_more_time_but_not_all():
    assert beats_until_given_up(computes=0.1) == 20 * BEATS + 1


def test_one_that_answers_is_not_given_up():
    assert beats_until_given_up(computes=0.0, answers_every=BEATS) is None
    assert beats_until_given_up(computes=0.1, answers_every=BEATS) is None


def test_processor_seconds_are_those_of_the_process():
    before, end = processor_seconds(os.getpid()), time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert 0.05 <= processor_seconds(os.getpid()) - before < 10
    assert processor_seconds(2**30) == 0.0
