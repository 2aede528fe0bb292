"""How long the steps of a pipeline take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.given import number
from lockstep.parallel.schedules.table import ScheduleError

PerStage = float | Sequence[float] | Sequence[Sequence[float]]


@dataclass(frozen=True)
class StageTimes:
    """Times of forward, input gradient and weight gradient, in any one unit.

    Each is a number, or one per device, or ``[device][chunk]``. With chunks, a time is that of one chunk.
    ``overlapped``: time of a forward and a full backward that run as one overlapped step (DualPipeV), as a fraction
    of ``f + b + w``; 1 means that overlapping gains nothing.
    """

    f: PerStage
    b: PerStage
    w: PerStage
    overlapped: float = 1.0

    def grids(self, stages: int, chunks: int) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
        """The three times as ``[device][chunk]``."""
        number(self.overlapped, "times.overlapped", above=True, error=ScheduleError)
        f, b, w = (grid(getattr(self, key), stages, chunks, f"times.{key}") for key in ("f", "b", "w"))
        return f, b, w


def grid(value: PerStage, stages: int, chunks: int, key: str) -> list[list[float]]:
    """A number, a number per device or ``[device][chunk]``, spread to ``[device][chunk]``; checks the shape."""
    given: Any = value if _listed(value) else [value] * stages
    rows = [_cells(each, chunks, key) for each in given]
    if len(rows) != stages or any(len(r) != chunks for r in rows):
        shape = [len(r) for r in rows]
        raise ScheduleError(
            f"{key} has {len(rows)} rows of lengths {shape}; expected a number, {stages} numbers (one per device), or "
            f"{stages} rows of {chunks} (one per chunk)."
        )
    return rows


def _cells(value: Any, chunks: int, key: str) -> list[float]:
    """Of one device: a number for every chunk, or one that counts for all."""
    return [number(x, key, error=ScheduleError) for x in (value if _listed(value) else [value] * chunks)]


def _listed(value: Any) -> bool:
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str)
