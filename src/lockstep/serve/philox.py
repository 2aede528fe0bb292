"""One number of Philox 4x64-10, a counter-based generator, in whole numbers of Python.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011. The bits are those of `numpy.random.Philox`,
which takes several times as long to set up for a single number.
"""

from __future__ import annotations

_WORD = 2**64 - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


def philox(key: tuple[int, int], counter: int) -> int:
    """The first 64-bit word that `numpy.random.Philox(key=key, counter=counter)` gives."""
    counter += 1  # NumPy counts before it draws
    a, b, c, d = counter & _WORD, counter >> 64 & _WORD, 0, 0
    first, second = key
    for _ in range(_ROUNDS):
        low, high = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (high >> 64) ^ b ^ first, high & _WORD, (low >> 64) ^ d ^ second, low & _WORD
        first, second = (first + _WEYL[0]) & _WORD, (second + _WEYL[1]) & _WORD
    return a
