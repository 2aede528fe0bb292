"""The order in which sequences are seen: a keyed permutation per epoch, a function of (seed, position) alone.

A Feistel network permutes the smallest even-bit range that holds all sequences; indices that fall outside are
walked on until they fall inside (cycle walking; Black and Rogaway, 2002). No state, no stored permutation:
any step's batch is found at once, so resuming needs only the step.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_ROUNDS = 6


def sequence_at(seed: int, position: int, count: int) -> int:
    """The index (below ``count``) of the sequence at this place of the endless stream of epochs."""
    epoch, index = divmod(position, count)
    key = _mix(_mix(seed) ^ epoch)
    bits = max((count - 1).bit_length() + 1, 2) // 2
    while True:
        index = _feistel(index, bits, key)
        if index < count:
            return index


def batch_at(seed: int, step: int, size: int, count: int) -> list[int]:
    """The sequences of global batch ``step`` (0-based), in order."""
    return [sequence_at(seed, step * size + i, count) for i in range(size)]


def _feistel(index: int, bits: int, key: int) -> int:
    mask = (1 << bits) - 1
    left, right = index >> bits, index & mask
    for r in range(_ROUNDS):
        left, right = right, left ^ (_mix(key ^ _mix((r << 56) | right)) & mask)
    return (left << bits) | right


def _mix(x: int) -> int:
    """SplitMix64's finaliser (Steele et al., 2014): a bijection of 64-bit integers that mixes well."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
