"""The vector of a sequence, pooled from its tokens' final hidden states (after the final norm) as they come.

A hidden state depends on its own sequence alone, and pooling adds in the order of the tokens in float64: a vector has
the same bytes whatever it was computed beside, and however the sequence was cut into chunks.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lockstep.serve.params import Embedding

Vector = NDArray[np.float32]


class Pool:
    """`add` states until there are those of all tokens, then `vector`."""

    def __init__(self, wanted: Embedding) -> None:
        self._wanted = wanted
        self._pooled: NDArray[np.float64] | None = None
        """[D]: the sum so far, or the last state."""
        self.count = 0
        """Tokens from the first on whose states it has."""

    @property
    def reads_all(self) -> bool:
        """Every token's state is wanted: it must be computed, what the cache has of it is not enough."""
        return self._wanted.pooling == "mean"

    def add(self, start: int, states: NDArray[np.float64]) -> None:
        """states [T, D] of the tokens from `start` on; those that it has already (of a sequence that was preempted)
        are the same again, and are not added twice."""
        new = states[max(0, self.count - start) :]
        if not len(new):
            return
        self.count = start + len(states)
        if not self.reads_all:
            self._pooled = new[-1]
        else:  # down a column NumPy adds row by row
            rows = new if self._pooled is None else np.vstack([self._pooled, new])
            self._pooled = np.add.reduce(rows, axis=0)

    def vector(self) -> Vector:
        """float32 [D]: the mean over all tokens, or the last one's state; of length 1 where that is wanted."""
        assert self._pooled is not None, "no states"
        vector = self._pooled / self.count if self.reads_all else self._pooled
        if self._wanted.unit:
            length = math.sqrt(math.fsum(vector * vector))  # fsum: rounded once, in no order
            vector = vector / length if length else vector
        return vector.astype(np.float32)
