"""Functions of the extension that are called past PyTorch, by ctypes.

They are for what happens at every token. A step of decoding reads all weights, which drives everything else out of the
caches: a call that takes 6 us of PyTorch's dispatcher or of NumPy in a loop takes 100 us then, one of ctypes 20 us.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from lockstep.ops import build


@lru_cache
def called() -> ctypes.CDLL:
    """The functions, `lockstep_*`."""
    library = ctypes.CDLL(str(build.library(build.load())))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for name, arguments, result in (
        ("lockstep_program_run", [pointer, pointer], ctypes.c_bool),
        ("lockstep_watch_same", [pointer], ctypes.c_bool),
        ("lockstep_largest", [pointer, number, number, pointer], None),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def largest(rows: Tensor) -> list[int]:
    """Of each row of float32 [R, V] the place of its largest number, the first among equals; -1 where one is NaN, or
    the largest infinite."""
    if rows.dtype != torch.float32 or rows.dim() != 2:
        raise ValueError(f"expected float32 [rows, width], got {rows.dtype} {list(rows.shape)}")
    if not rows.is_contiguous():
        rows = rows.contiguous()
    places = (ctypes.c_int64 * len(rows))()
    called().lockstep_largest(rows.data_ptr(), *rows.shape, ctypes.addressof(places))
    return list(places)
