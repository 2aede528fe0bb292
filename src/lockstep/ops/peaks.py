"""What this machine can do, measured: matrix products and memory reads. The ruler for MFU and for kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache, partial
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.ops import build
from lockstep.ops.operators import operators

T = TypeVar("T")
_LARGEST = 2048
_RUNS = 7
_LONGEST = 0.2
"""Seconds that one product may take."""


@lru_cache
def matrix_peak(dtype: torch.dtype) -> float:
    """The best rate of matrix products of `dtype` on this machine, FLOP/s (2 n^3 for n x n by n x n).

    The best of PyTorch's product and, once built, the contract kernel. A product of bfloat16 values can always
    be done in float32, so the float32 rates count for it too: without bf16 instructions PyTorch's own bfloat16
    product is many times slower than that.
    """
    return max(_of_products(dtype, contract_rate, torch_rate))


def matrix_meter(dtype: torch.dtype) -> Callable[[], float]:
    """A call that measures `matrix_peak` anew, with the product that is the fastest now.

    For a comparison's turns: what a machine gives that others use too changes by the minute.
    """
    return max(_of_products(dtype, _contract_meter, _torch_meter), key=lambda meter: meter())


@lru_cache
def torch_rate(dtype: torch.dtype) -> float:
    """FLOP/s of `torch.mm` on square matrices, the size as large as the time allows."""
    return _torch_meter(dtype)()


@lru_cache
def contract_rate(dtype: torch.dtype) -> float:
    """FLOP/s of the contract kernel behind `linear`, the weight packed before. Builds the kernels if need be."""
    return _contract_meter(dtype)()


def read_bandwidth() -> float:
    """Bytes per second that all threads together read from memory at this moment (a sum over 256 MiB)."""
    buffer = torch.ones(64 * 2**20)
    buffer.sum()
    return buffer.nbytes / median(_seconds(buffer.sum) for _ in range(5))


def _of_products(
    dtype: torch.dtype, contract: Callable[[torch.dtype], T], plain: Callable[[torch.dtype], T]
) -> list[T]:
    """Of the products that can be done with values of `dtype`: the contract's, once they are built, and PyTorch's."""
    kinds = {dtype, torch.float32}
    return [*(map(contract, kinds) if build.is_built(build.best_isa()) else ()), *map(plain, kinds)]


def _torch_meter(dtype: torch.dtype) -> Callable[[], float]:
    return _meter(lambda n: _operands(n, dtype), torch.mm)


def _contract_meter(dtype: torch.dtype) -> Callable[[], float]:
    ops = operators("bitwise")

    def prepared(n: int) -> tuple[Tensor, Tensor]:
        x, weight = _operands(n, dtype)
        with torch.no_grad():
            return x, ops.pack(weight, dtype)

    return _meter(prepared, ops.linear)


def _operands(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, n, n, generator=generator).to(dtype)
    return left, right


def _meter(
    prepare: Callable[[int], tuple[Tensor, Tensor]], product: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[], float]:
    """A call that gives the best rate of a few at the largest size whose product is not too long: a moment in which
    others had the cores is not the machine's peak, and would let a step come out faster than possible."""
    n = 128
    while True:
        run = torch.no_grad()(partial(product, *prepare(n)))
        # The best of a few: the first call pays for threads and buffers, and other programs may be in the way.
        once = min(_seconds(run) for _ in range(4))
        if n == _LARGEST or 8 * once > _LONGEST:  # twice the size takes eight times as long
            return lambda: 2 * n**3 / min(_seconds(run) for _ in range(_RUNS))
        n *= 2


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
