"""What happens to weights: `csrc/optimizer.cpp`, `csrc/dequantize.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.ops.raw.define import define, same


@define(
    "adamw(Tensor(a!) p, Tensor g, Tensor(b!) m, Tensor(c!) v, float scale, float beta1, float rest1, float beta2, "
    "float rest2, float root, float eps, float keep, float lr) -> ()"
)
def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *factors: float) -> None:
    """One update in place; all float32 of one shape."""
    for name, tensor in (("g", g), ("m", m), ("v", v)):
        same(name, tensor.numel(), p.numel())


@define("square_sum(Tensor x) -> Tensor")
def square_sum(x: Tensor) -> Tensor:
    """The sum of squares, a float64 scalar."""
    return x.new_empty((), dtype=torch.float64)


@define("dequantize(Tensor blocks, int kind, int size, int count, Tensor(a!) out) -> ()")
def dequantize(blocks: Tensor, kind: int, size: int, count: int, out: Tensor) -> None:
    """uint8 blocks of a ggml format into out; a block of `size` bytes holds `count` values."""
    same("bytes", blocks.numel(), out.numel() // count * size)
