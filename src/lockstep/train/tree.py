"""Sums in a fixed order: the binary tree over micro-batch gradients, and the global gradient norm.

Both are made of single elementwise IEEE additions, so neither the number of threads nor the way in which
work is spread over accumulation steps can change a bit (contract C5).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

BLOCK = 1 << 16
"""Elements summed as one block of a gradient norm: a block in float64 stays in the second-level cache."""


class GradientTree:
    """Adds gradients pushed one micro-batch at a time, in a binary tree that only their number defines.

    ``n`` leaves are split at the largest power of two below ``n``, recursively: 5 gives
    ``((g0 + g1) + (g2 + g3)) + g4``. At most ``log2(n) + 1`` partial sums are alive. A rank that holds an
    aligned run of ``2 ** k`` leaves computes exactly one node of the tree.
    """

    def __init__(self) -> None:
        self._partial: list[tuple[int, list[Tensor]]] = []

    def push(self, gradient: list[Tensor]) -> None:
        """Add the next leaf: one tensor per parameter, owned by the tree from now on (it is added into)."""
        leaves = 1
        while self._partial and self._partial[-1][0] == leaves:
            gradient = _add(self._partial.pop()[1], gradient)
            leaves *= 2
        self._partial.append((leaves, gradient))

    def total(self) -> list[Tensor]:
        """The root; the tree is empty afterwards."""
        _, total = self._partial.pop()
        while self._partial:
            total = _add(self._partial.pop()[1], total)
        return total


def _add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    for a, b in zip(left, right, strict=True):
        a.add_(b)
    return left


def tree_sum(values: Tensor) -> Tensor:
    """The sum over the first dimension, whose length is a power of two: halves are added until one row is left."""
    while len(values) > 1:
        half = len(values) // 2
        values = values[:half] + values[half:]
    return values[0]


def tree_total(values: Sequence[float]) -> float:
    """The sum of Python floats by the same tree; 0.0 for none."""
    return float(tree_sum(_pad(torch.tensor(values, dtype=torch.float64)))) if values else 0.0


def square_sum(gradient: Tensor) -> Tensor:
    """The sum of squares of one tensor, float64 scalar. Squares of float32 are exact in float64."""
    flat = gradient.detach().reshape(-1)
    partial = [_block_sum(flat[i : i + BLOCK]) for i in range(0, len(flat), BLOCK)]
    return tree_sum(_pad(torch.stack(partial)) if len(partial) > 1 else partial[0][None])


def _block_sum(block: Tensor) -> Tensor:
    wide = block.double()
    return tree_sum(_pad(wide * wide))


def _pad(values: Tensor) -> Tensor:
    """Zeros up to the next power of two; adding them is exact, so they change no sum."""
    short = (1 << (len(values) - 1).bit_length()) - len(values)
    return values if short == 0 else torch.cat([values, values.new_zeros(short)])


def global_norm(gradients: Iterable[Tensor]) -> float:
    """The root of the sum of all squares, tensors in the given order. NaN or infinite if any element is."""
    sums = torch.stack([square_sum(g) for g in gradients])
    return float(tree_sum(_pad(sums)).sqrt())
