"""The device class `cpu-avx512-bf16`, run in a process that has its kernels, and what they must give.

The oracle of an instruction is exact arithmetic over fractions, that of a product the chain in numpy.
"""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.ops import build
from lockstep.ops.linear import input_gradient, linear, pack, weight_gradient
from tests.class_of_pairs import sitecustomize
from tests.ops.compare import differing, randn
from tests.ranks_as_threads import on_threads
from tests.threads import threads

BF16, F32 = torch.bfloat16, torch.float32
SMALLEST = Fraction(1, 2**126)
"""Below it a magnitude counts as zero."""

Signed = tuple[Fraction, bool]
"""A number and its sign, which a zero has too."""


def check() -> str:
    """Makes this process one of the class, and checks everything; the fingerprint of its bits."""
    from tests.ops.fingerprint import fingerprint

    sitecustomize.take_over()
    found = fingerprint(build.best_isa())
    for test in (check_instruction, check_products, check_weight_gradients, check_error, check_shared_rows):
        test()
    return found


def value(bits: int, mantissa: int) -> Signed:
    """A float of eight exponent bits; its subnormals are zeros."""
    negative, exponent = bool(bits >> mantissa + 8), bits >> mantissa & 255
    fraction = Fraction((bits & (1 << mantissa) - 1) + (1 << mantissa), 1 << mantissa)
    number = Fraction(0) if exponent == 0 else fraction * Fraction(2) ** (exponent - 127)
    return (-number if negative else number), negative


def rounded(exact: Signed) -> int:
    """The bits of the nearest float32 (of two the even one) with an exponent of any size, as zero where it is small."""
    number, negative = exact
    sign = negative << 31
    size = abs(number)
    if size == 0:
        return sign
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    steps = round(size / Fraction(2) ** (exponent - 23))  # Python rounds halves to even
    if steps == 1 << 24:
        exponent, steps = exponent + 1, 1 << 23
    if exponent > 127:
        return sign | 0x7F800000
    return sign | (exponent + 127 << 23 | steps - (1 << 23) if exponent >= -126 else 0)


def fused(a: int, b: int, c: int) -> int:
    """The bits of a x b + c for bfloat16 a and b and float32 c, all finite."""
    (x, x_sign), (y, y_sign), (z, z_sign) = value(a, 7), value(b, 7), value(c, 23)
    total = x * y + z
    # A sum that is zero is negative only where both of its terms are.
    negative = total < 0 or (total == 0 and (x_sign != y_sign) and z_sign)
    return rounded((total, negative))


def numbers(generator: random.Random, count: int) -> list[int]:
    """bfloat16 bits: zeros, subnormals, the least normal ones, and those around 2^-63, whose products are least."""
    exponents = [0, 1, 2, 60, 63, 64, 65, 126, 127, 130, 180]
    return [generator.choice([0, 1]) << 15 | generator.choice(exponents) << 7 | generator.randrange(128)
            for _ in range(count)]  # fmt: skip


def of_bits(bits: list[int], dtype: torch.dtype, *shape: int) -> Tensor:
    whole = torch.tensor(bits, dtype=torch.int64)
    return whole.to(torch.int16 if dtype == BF16 else torch.int32).view(dtype).view(*shape)


def check_instruction() -> None:
    """Every lane of a step, with an odd element and without: an exact oracle, to the bit."""
    generator, rows, columns = random.Random(0), 24, 40
    for depth in (1, 2):
        left, right = numbers(generator, depth * rows), numbers(generator, depth * columns)
        sums = [generator.getrandbits(1) << 31 | generator.choice([0, 1, 2, 100, 127]) << 23 | generator.getrandbits(23)
                for _ in range(rows * columns)]  # fmt: skip
        # The least normal number, less 1, 3/4, 1/2, 1/4 and 5/4 of the unit below it: flushed, or rounded up to it.
        least = [(0x1A00, 0x9A00), (0x1A00, 0x99C0), (0x1A00, 0x9980), (0x1A00, 0x9900), (0x1A20, 0x9A00)]
        for i, (a, b) in enumerate(least):
            left[i], right[i], sums[i * columns + i] = a, b, 0x00800000
            if depth == 2:
                left[rows + i] = 0
        found = of_bits(sums, F32, rows, columns).clone()
        weight_gradient(of_bits(left, BF16, depth, rows), of_bits(right, BF16, depth, columns), out=found)
        for i, j in itertools.product(range(rows), range(columns)):
            odd = (left[rows + i], right[columns + j]) if depth == 2 else (0, 0)
            expected = fused(left[i], right[j], fused(*odd, sums[i * columns + j]))
            given_bits = int(found[i, j].view(torch.int32)) & 0xFFFFFFFF
            assert given_bits == expected, (i, j, hex(left[i]), hex(right[j]), hex(sums[i * columns + j]))


def chain(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """a [m, k] x b [k, n] from start on, float32. Elements of at least 2^-10 or zero: in float64 a step is exact."""
    left, right, total = (x.double().numpy() for x in (a, b, start))
    for p in range(0, a.shape[1], 2):
        for at in (p + 1, p):
            if at < a.shape[1]:
                total = (total + left[:, at, None] * right[at]).astype(np.float32).astype(np.float64)
    return torch.from_numpy(total.astype(np.float32))


def coarse(seed: int, *shape: int) -> Tensor:
    x = randn(seed, *shape, dtype=BF16)
    return x.where(x.abs() >= 2**-10, 0)


SIZES = {"m": st.integers(1, 110), "n": st.integers(1, 70), "k": st.integers(1, 450)}


@settings(max_examples=30, deadline=None)
@given(**SIZES, count=st.sampled_from([1, 2, 4]))
def check_products(m: int, n: int, k: int, count: int) -> None:
    """Forward and input gradient, packed and not, with a few threads: the chain by pairs."""
    a, weight = coarse(0, m, k), coarse(1, n, k)
    expected = chain(a, weight.T, torch.zeros(m, n))
    with threads(count):
        assert differing(linear(a, weight, out_dtype=F32), expected) == 0
        assert differing(linear(a, pack(weight.float(), BF16), out_dtype=F32), expected) == 0
        assert differing(input_gradient(a, weight.T.contiguous(), F32), expected) == 0


@settings(max_examples=30, deadline=None)
@given(**SIZES, cut=st.integers(0, 224), count=st.sampled_from([1, 2, 4]))
def check_weight_gradients(m: int, n: int, k: int, cut: int, count: int) -> None:
    """A chain over rows, and one that goes on at an even row."""
    dy, x = coarse(0, k, m), coarse(1, k, n)
    cut = 2 * cut % k // 2 * 2
    expected = chain(dy.T, x, torch.zeros(m, n))
    with threads(count):
        assert differing(weight_gradient(dy, x), expected) == 0
        first = weight_gradient(dy[:cut], x[:cut]) if cut else torch.zeros(m, n)
        assert differing(weight_gradient(dy[cut:], x[cut:], out=first), expected) == 0


@settings(max_examples=20, deadline=None)
@given(m=st.integers(1, 60), n=st.integers(1, 40), k=st.integers(1, 2000), power=st.integers(-60, 50))
def check_error(m: int, n: int, k: int, power: int) -> None:
    """Every step rounds once, by 2^-24 at most of a sum of at most the sum S of magnitudes and what rounding added, and
    flushes at most 2^-126: |y - exact| <= ((1 + 2^-24)^n - 1) S + 2 n 2^-126, n being k made even."""
    a, b = randn(0, m, k, dtype=BF16) * 2.0**power, randn(1, n, k, dtype=BF16)
    y, exact = linear(a, b, out_dtype=F32).double(), a.double() @ b.double().T
    even = k + k % 2
    allowed = ((1 + 2**-24) ** even - 1) * (a.double().abs() @ b.double().abs().T) + 2 * even * 2.0**-126
    assert bool(((y - exact).abs() <= allowed * (1 + 1e-9)).all())


def check_shared_rows() -> None:
    """Ranks of context parallelism hand gradients on between two pairs of rows."""
    from tests.parallel.test_tensor_parallel import check_contexts  # its operators are those of the class

    with threads(1):
        check_contexts(on_threads, "llama")
