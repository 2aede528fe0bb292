"""How fast a run goes: tokens per second, MFU, memory, time left."""

from __future__ import annotations

from pathlib import Path

import torch

from lockstep.config.train import TrainConfig
from lockstep.ops.peaks import matrix_peak
from lockstep.train.display import StepLine
from lockstep.train.resume import Position

_SMOOTH = 0.9
_FIRST = 2
"""Steps that may compile."""


class Speed:
    """Smooths step times (exponentially, over about ten steps). The first two steps are no measure of those to
    come (either may compile, `when_to_compile`): what is left is told behind them.

    ranks: processes that train together, each on a device as fast as this; 0: this one tells nobody, so nothing is
    measured for the MFU."""

    def __init__(self, train: TrainConfig, ranks: int = 1) -> None:
        self._steps = train.steps
        self._peak = matrix_peak(getattr(torch, train.dtype)) * ranks if ranks else None
        self._seconds = self._tokens = self._flops = 0.0
        self._seen = 0

    def line(self, at: Position, loss: float, tokens: int, flops: float, seconds: float) -> StepLine:
        """The numbers after a step that took so long."""
        keep = _SMOOTH if self._seen > _FIRST else 0.0
        self._seen += 1
        self._seconds = keep * self._seconds + seconds
        self._tokens = keep * self._tokens + tokens
        self._flops = keep * self._flops + flops
        rate = self._tokens / self._seconds
        left = (self._steps - at.step) * tokens / rate if self._seen > _FIRST else None
        mfu = None if self._peak is None else self._flops / self._seconds / self._peak
        return StepLine(at.step, self._steps, loss, rate, mfu, resident(), left)


def resident() -> int:
    """Resident memory of this process, bytes; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * 4096
