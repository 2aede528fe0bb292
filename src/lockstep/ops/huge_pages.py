"""Memory for what every step reads whole: packed weights, in pages of 2 MiB where the system has them.

A decode step reads all weights once. With pages of 4 KiB a processor looks up 65,536 of them for 256 MiB, and its table
of looked-up pages holds 2,048. With large ones the one-row products of SmolLM2-135M's layers read about a tenth faster
(8 to 12 % in four runs in turn, one thread). Most weights are smaller than one such page, so many share a slab; a slab
is freed with the last tensor in it.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

_SLAB = 32 * 2**20
_LINE = 64
"""Tensors begin at cache lines."""


class HugePages:
    """Gives out tensors that lie together in slabs."""

    def __init__(self, slab: int = _SLAB) -> None:
        self._bytes, self._lock = slab, Lock()
        self._rest: Tensor | None = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; what does not fit into a slab gets one of its own."""
        size = math.prod(shape) * dtype.itemsize
        taken = -(-size // _LINE) * _LINE
        if taken > self._bytes:
            return _slab(taken)[:size].view(dtype).view(shape)
        with self._lock:
            if self._rest is None or len(self._rest) < taken:
                self._rest = _slab(self._bytes)
            memory, self._rest = self._rest[:size], self._rest[taken:]
        return memory.view(dtype).view(shape)


def _slab(size: int) -> Tensor:
    """Bytes that take memory once they are written, in large pages where the system has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages: the memory is as good, only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size)
