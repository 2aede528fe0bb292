"""The tensors of a step, in memory that is kept.

While the same sequences decode, steps are alike but for the tokens, the positions and, now and then, a page. So a step
writes what is new over the last one's tensors, and gives the very same ones: who has bound them need not do so again.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.ops import Paged
from lockstep.serve.scheduler import Step


class Inputs:
    """What `fill` gives is overwritten by the next `fill`."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._width = 0

    def fill(self, step: Step) -> tuple[Tensor, Paged]:
        """The step's tokens, int64 [T], and where they belong."""
        chunks = step.chunks
        counts = [len(chunk.tokens) for chunk in chunks]
        width = max([len(chunk.pages) for chunk in chunks])
        if counts != self._counts or width != self._width:
            self._make(counts, width)
        self._tokens[:] = [token for chunk in chunks for token in chunk.tokens]
        self._positions[:] = [place for chunk in chunks for place in range(chunk.start, chunk.end)]
        for i, chunk in enumerate(chunks):
            if chunk.pages != self._pages[i]:
                count = len(chunk.pages)
                self._table[i, :count], self._table[i, count:] = chunk.pages, 0
                self._pages[i] = chunk.pages
        return self._given

    def _make(self, counts: list[int], width: int) -> None:
        """Tensors for chunks of so many tokens, with page tables of so many entries."""
        self._counts, self._width = counts, width
        self._pages: list[tuple[int, ...]] = [()] * len(counts)
        self._tokens = np.empty(sum(counts), dtype=np.int64)
        self._positions = np.empty(sum(counts), dtype=np.int32)
        self._table = np.zeros((len(counts), width), dtype=np.int32)
        starts = torch.from_numpy(np.cumsum([0, *counts], dtype=np.int32))
        batch = Paged(torch.from_numpy(self._positions), starts, torch.from_numpy(self._table))
        self._given = torch.from_numpy(self._tokens), batch
