"""ggml's quantised formats to numbers: `csrc/dequantize.cpp`, with the bits of the `gguf` package (`ops.plain`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.ops.raw import kernel


@dataclass(frozen=True)
class Format:
    """number: ggml's. A block of `count` values takes `size` bytes."""

    number: int
    count: int
    size: int


FORMATS = {
    "Q4_0": Format(2, 32, 18),
    "Q4_1": Format(3, 32, 20),
    "Q5_0": Format(6, 32, 22),
    "Q5_1": Format(7, 32, 24),
    "Q8_0": Format(8, 32, 34),
    "Q4_K": Format(12, 256, 144),
    "Q5_K": Format(13, 256, 176),
    "Q6_K": Format(14, 256, 210),
}
"""The formats that can be read, by ggml's names."""


def dequantize(blocks: Tensor, name: str, out: Tensor) -> None:
    """Fill `out` (float32 or bfloat16, contiguous, of any shape) with the values of uint8 `blocks`, in order."""
    if name not in FORMATS:
        raise LockstepError(f"format is {name!r}: give one of {', '.join(FORMATS)}.")
    kernel.dequantize(blocks, FORMATS[name].number, FORMATS[name].size, FORMATS[name].count, out)
