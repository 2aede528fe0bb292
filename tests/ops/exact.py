"""Arithmetic of bfloat16 instructions over fractions, to the bit: what they must give where all is finite."""

from __future__ import annotations

import random
from fractions import Fraction

import torch
from torch import Tensor

Signed = tuple[Fraction, bool]
"""A number and its sign, which a zero has too."""


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


def added(a: int, b: int) -> int:
    """The bits of a + b for float32, both finite."""
    (x, x_sign), (y, y_sign) = value(a, 23), value(b, 23)
    return rounded((x + y, x + y < 0 or (x + y == 0 and x_sign and y_sign)))


def numbers(generator: random.Random, count: int) -> list[int]:
    """bfloat16 bits: zeros, subnormals, the least normal ones, and those around 2^-63, whose products are least."""
    exponents = [0, 1, 2, 60, 63, 64, 65, 126, 127, 130, 180]
    return [generator.choice([0, 1]) << 15 | generator.choice(exponents) << 7 | generator.randrange(128)
            for _ in range(count)]  # fmt: skip


def of_bits(bits: list[int], dtype: torch.dtype, *shape: int) -> Tensor:
    whole = torch.tensor(bits, dtype=torch.int64)
    return whole.to(torch.int16 if dtype == torch.bfloat16 else torch.int32).view(dtype).view(*shape)
