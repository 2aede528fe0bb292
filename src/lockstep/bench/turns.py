"""Sides that take turns: a busy moment of the machine hits all of them, so their ratio stays true."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """The median of some measurements, with the least and the largest."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        found = sorted(values)
        return Spread(statistics.median(found), found[0], found[-1])

    @property
    def width(self) -> float:
        """(largest - least) / median."""
        return (self.high - self.low) / self.median


def take_turns(
    sides: Mapping[str, Callable[[], T]],
    rounds: int,
    warmup: int = 1,
    progress: Callable[[int, dict[str, T]], None] | None = None,
) -> dict[str, list[T]]:
    """Call each side once a round, in turn; what they returned, by side, without the warm-up rounds.

    progress is told the number of the round (from 0, the warm-up rounds not counted) and what the sides returned.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    for i in range(-warmup, rounds):
        answers = {name: side() for name, side in sides.items()}
        if i < 0:
            continue
        for name, answer in answers.items():
            found[name].append(answer)
        if progress is not None:
            progress(i, answers)
    return found


def ratios(ours: Iterable[float], theirs: Iterable[float]) -> Spread:
    """theirs / ours of each round, as the two took turns in it: more than 1 where ours is faster."""
    return Spread.of(b / a for a, b in zip(ours, theirs, strict=True))
