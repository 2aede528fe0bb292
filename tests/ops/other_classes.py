"""The device classes that multiply bfloat16 otherwise, in a process that has their kernels, and what they must give.

The oracle of an instruction is exact arithmetic over fractions, that of a product the chain in numpy.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lockstep.ops import build
from lockstep.ops.device_class import AMX_CLASS, BF16_CLASS, device_class
from lockstep.ops.linear import input_gradient, linear, pack, rows_together, weight_gradient
from tests.another_class import sitecustomize
from tests.ops.compare import differing, randn
from tests.ops.exact import added, fused, numbers, of_bits
from tests.ranks_as_threads import on_threads
from tests.threads import threads

BF16, F32 = torch.bfloat16, torch.float32


def check(name: str) -> str:
    """Makes this process one of the class, and checks everything; the fingerprint of its bits."""
    from tests.ops.fingerprint import fingerprint

    sitecustomize.take_over(name)
    assert device_class() == name
    found = fingerprint(build.best_isa())
    for test in (check_instruction, check_products, check_weight_gradients, check_error, check_shared_rows):
        test()
    return found


def check_instruction() -> None:
    """Every element, with few k and with an odd number of them: an exact oracle, to the bit."""
    generator, rows, columns = random.Random(0), 24, 40
    for depth in (1, 2, 3) if device_class() == AMX_CLASS else (1, 2):
        left, right = numbers(generator, depth * rows), numbers(generator, depth * columns)
        sums = [generator.getrandbits(1) << 31 | generator.choice([0, 1, 2, 100, 127]) << 23 | generator.getrandbits(23)
                for _ in range(rows * columns)]  # fmt: skip
        _nearly_least(depth, left, right, sums)
        found = of_bits(sums, F32, rows, columns).clone()
        weight_gradient(of_bits(left, BF16, depth, rows), of_bits(right, BF16, depth, columns), out=found)
        for i, j in itertools.product(range(rows), range(columns)):
            expected = _STEP[device_class()](left[i::rows], right[j::columns], sums[i * columns + j])
            given_bits = int(found[i, j].view(torch.int32)) & 0xFFFFFFFF
            assert given_bits == expected, (i, j, hex(left[i]), hex(right[j]), hex(sums[i * columns + j]))


def _nearly_least(depth: int, left: list[int], right: list[int], sums: list[int]) -> None:
    """The least normal number, less 1, 3/4, 1/2, 1/4 and 5/4 of the unit below it: flushed, or rounded up to it. Of
    three k the first product is that number, and the third what it is lessened by."""
    rows, columns = len(left) // depth, len(right) // depth
    less = [(0x1A00, 0x9A00), (0x1A00, 0x99C0), (0x1A00, 0x9980), (0x1A00, 0x9900), (0x1A20, 0x9A00)]
    for i, (a, b) in enumerate(less):
        last = depth - 1 if depth == 3 else 0
        left[last * rows + i], right[last * columns + i], sums[i * columns + i] = a, b, 0x00800000
        if depth == 3:
            left[i], right[i], sums[i * columns + i] = 0x2000, 0x2000, 0
        if depth > 1:
            left[rows + i] = 0


def _pair(left: list[int], right: list[int], sum: int) -> int:
    (*_, last), (*_, other) = [0, *left[1:]], [0, *right[1:]]
    return fused(left[0], right[0], fused(last, other, sum))


def _tile(left: list[int], right: list[int], sum: int) -> int:
    """Of a few k, with zeros behind them: one pair of those is as many."""
    chains = []
    for parity in (0, 1):
        total = 0
        for a, b in zip([*left[parity::2], 0], [*right[parity::2], 0], strict=True):
            total = fused(a, b, total)
        chains.append(total)
    return added(sum, added(*chains))


_STEP: dict[str, Callable[[list[int], list[int], int], int]] = {BF16_CLASS: _pair, AMX_CLASS: _tile}

Array = NDArray[np.float64]


def chain(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """a [m, k] x b [k, n] from start on, float32. Elements of at least 2^-10 or zero: in float64 a step is exact."""
    left, right, total = (x.double().numpy() for x in (a, b, start))
    whole = {BF16_CLASS: _by_pairs, AMX_CLASS: _by_tiles}[device_class()](left, right, total)
    return torch.from_numpy(whole.astype(np.float32))


def _rounded(x: Array) -> Array:
    return x.astype(np.float32).astype(np.float64)


def _by_pairs(left: Array, right: Array, total: Array) -> Array:
    for p in range(0, len(right), 2):
        for at in (p + 1, p):
            if at < len(right):
                total = _rounded(total + left[:, at, None] * right[at])
    return total


def _by_tiles(left: Array, right: Array, total: Array) -> Array:
    for first in range(0, len(right), 32):
        last, chains = min(first + 32, len(right)), []
        for parity in (0, 1):
            sums = np.zeros_like(total)
            for p in range(first + parity, last, 2):
                sums = _rounded(sums + left[:, p, None] * right[p])
            chains.append(sums)
        total = _rounded(total + _rounded(chains[0] + chains[1]))
    return total


def coarse(seed: int, *shape: int) -> Tensor:
    x = randn(seed, *shape, dtype=BF16)
    return x.where(x.abs() >= 2**-10, 0)


SIZES = {"m": st.integers(1, 110), "n": st.integers(1, 70), "k": st.integers(1, 450) | st.integers(500, 1100)}


@settings(max_examples=30, deadline=None)
@given(**SIZES, count=st.sampled_from([1, 2, 4]))
def check_products(m: int, n: int, k: int, count: int) -> None:
    """Forward and input gradient, packed and not, with a few threads: the chain by pairs, or by tiles."""
    a, weight = coarse(0, m, k), coarse(1, n, k)
    expected = chain(a, weight.T, torch.zeros(m, n))
    with threads(count):
        assert differing(linear(a, weight, out_dtype=F32), expected) == 0
        assert differing(linear(a, pack(weight.float(), BF16), out_dtype=F32), expected) == 0
        assert differing(input_gradient(a, weight.T.contiguous(), F32), expected) == 0


@settings(max_examples=30, deadline=None)
@given(**SIZES, cut=st.integers(0, 2200), count=st.sampled_from([1, 2, 4]))
def check_weight_gradients(m: int, n: int, k: int, cut: int, count: int) -> None:
    """A chain over rows; one that goes on after whole pairs or tiles: the same; and one that goes on after any row,
    with pairs or tiles of its own."""
    dy, x = coarse(0, k, m), coarse(1, k, n)
    expected = chain(dy.T, x, torch.zeros(m, n))
    with threads(count):
        assert differing(weight_gradient(dy, x), expected) == 0
        for at in (cut % k // rows_together(BF16) * rows_together(BF16), cut % k):
            first = weight_gradient(dy[:at], x[:at]) if at else torch.zeros(m, n)
            if at % rows_together(BF16):
                expected = chain(dy[at:].T, x[at:], chain(dy[:at].T, x[:at], torch.zeros(m, n)))
            assert differing(weight_gradient(dy[at:], x[at:], out=first), expected) == 0


@settings(max_examples=20, deadline=None)
@given(m=st.integers(1, 60), n=st.integers(1, 40), k=st.integers(1, 2000), power=st.integers(-60, 50))
def check_error(m: int, n: int, k: int, power: int) -> None:
    """A product goes through r roundings one after the other at most, each by 2^-24 of a sum of at most the sum S of
    magnitudes and what rounding added, and the f operations of an element flush at most 2^-126 each:
    |y - exact| <= ((1 + 2^-24)^r - 1) S + 2 f 2^-126. By pairs r = f = k made even; by tiles r is the sixteen
    multiply-adds of its tile, the addition of both chains and one for each tile, f 34 for each."""
    a, b = randn(0, m, k, dtype=BF16) * 2.0**power, randn(1, n, k, dtype=BF16)
    y, exact = linear(a, b, out_dtype=F32).double(), a.double() @ b.double().T
    tiles, even = -(-k // 32), k + k % 2
    roundings, flushed = (17 + tiles, 34 * tiles) if device_class() == AMX_CLASS else (even, even)
    allowed = ((1 + 2**-24) ** roundings - 1) * (a.double().abs() @ b.double().abs().T) + 2 * flushed * 2.0**-126
    assert bool(((y - exact).abs() <= allowed * (1 + 1e-9)).all())


def check_shared_rows() -> None:
    """Ranks of context parallelism hand gradients on between two pairs of rows, or tiles of them; some have none."""
    from tests.parallel.test_tensor_parallel import check_contexts  # its operators are those of the class

    with threads(1):
        for lengths in ((12, 9), (60, 64, 31)):
            check_contexts(on_threads, "llama", lengths)
