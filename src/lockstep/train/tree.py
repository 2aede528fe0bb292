"""Sums in a fixed order: the gradients of canonical groups of micro-batches, and the global gradient norm.

Both are made of single elementwise IEEE additions, so neither the number of threads nor the way in which
work is spread over accumulation steps can change a bit (contract C5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lockstep.ops import Operators
from lockstep.ops.tree import tree_sum


class GradientTree:
    """Adds gradients pushed one micro-batch at a time, in an order that only their number and ``group`` define.

    Each ``group`` of them that follow one another are added up as they come, in one place; the groups' sums are the
    leaves of a binary tree. ``n`` leaves are split at the largest power of two below ``n``, recursively: 5 gives
    ``((g0 + g1) + (g2 + g3)) + g4``. At most ``log2(n) + 1`` partial sums are alive. A rank that holds an aligned run
    of ``2 ** k`` leaves computes exactly one node of the tree.
    """

    def __init__(self, group: int = 1, recycle: Callable[[list[Tensor]], None] | None = None) -> None:
        """group: micro-batches of a canonical group. recycle: takes tensors that were added into others."""
        self._partial: list[tuple[int, list[Tensor]]] = []
        self._group, self._begun = group, list[Tensor]()
        self._count = 0
        """Gradients that were added to the group that is begun."""
        self._recycle = recycle or (lambda tensors: None)

    def push(self, gradient: list[Tensor]) -> None:
        """Add the next one: a tensor per parameter, owned by the tree from now on (it is added into)."""
        gradient = self._add(self._begun, gradient) if self._count else gradient
        self._begun, self._count = gradient, self._count + 1
        if self._count < self._group:
            return
        self._begun, self._count, leaves = [], 0, 1
        while self._partial and self._partial[-1][0] == leaves:
            gradient = self._add(self._partial.pop()[1], gradient)
            leaves *= 2
        self._partial.append((leaves, gradient))

    def total(self) -> list[Tensor]:
        """The root, when the last group is whole; the tree is empty afterwards."""
        assert not self._count, f"a group of {self._group} micro-batches has {self._count}"
        _, total = self._partial.pop()
        while self._partial:
            total = self._add(self._partial.pop()[1], total)
        return total

    def _add(self, left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
        torch._foreach_add_(left, right)
        self._recycle(right)
        return left


def tree_total(values: Sequence[float]) -> float:
    """The sum of Python floats by the same tree; 0.0 for none."""
    return float(tree_sum(torch.tensor(values, dtype=torch.float64))) if values else 0.0


def global_norm(gradients: Iterable[Tensor], ops: Operators) -> float:
    """The root of the sum of all squares, tensors in the given order. NaN or infinite if any element is."""
    return float(tree_sum(torch.stack([ops.square_sum(g) for g in gradients])).sqrt())
