"""The largest values of a long row, without sorting or partitioning all of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_PIECE = 64


def edge(row: NDArray[np.float32], count: int) -> np.float32:
    """The `count`-th largest value of a row; count from 1 to its length. No NaN."""
    if count * 4 * _PIECE > len(row):
        return np.partition(row, len(row) - count)[len(row) - count]
    # As many pieces have a maximum of at least the bound: so many values are not below it.
    whole = len(row) - len(row) % _PIECE
    maxima = row[:whole].reshape(-1, _PIECE).max(axis=1)
    bound = np.partition(maxima, len(maxima) - count)[len(maxima) - count]
    few = row[row >= bound]
    return np.partition(few, len(few) - count)[len(few) - count]


def falling(values: NDArray[np.float32], ids: NDArray[np.intp]) -> NDArray[np.intp]:
    """ids ordered by their values, which are 0 or more: the largest first, the lower id first among equals."""
    # The bits of such floats order as they do; with the id below them no two keys are equal, so any sort will do.
    keys = (~values.view(np.uint32)).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(2**32 - 1)).astype(np.intp)
