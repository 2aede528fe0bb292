"""Sums by a binary tree of single IEEE additions: halves are added until one row is left."""

from __future__ import annotations

from torch import Tensor

SQUARE_BLOCK = 1 << 16
"""Elements summed as one block of a sum of squares: a block in float64 stays in the second-level cache."""


def contiguous_parts(tensor: Tensor, dim: int, count: int) -> list[Tensor]:
    """Contiguous segments of a dimension, as `torch.tensor_split` cuts them."""
    return [part.contiguous() for part in tensor.tensor_split(count, dim=dim)]


def neighbour_sum(values: list[Tensor]) -> Tensor:
    """The sum of a power of two of tensors: of neighbours, of neighbouring pairs, and so on. What a device has of
    neighbouring ones is a node of the whole tree."""
    while len(values) > 1:
        values = [left + right for left, right in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def tree_sum(values: Tensor) -> Tensor:
    """The sum over the first dimension (at least 1 row), padded with zeros to a power of two, which changes no sum."""
    short = (1 << (len(values) - 1).bit_length()) - len(values)
    if short:
        values = _with_zeros(values, short)
    while len(values) > 1:
        half = len(values) // 2
        values = values[:half] + values[half:]
    return values[0]


def _with_zeros(values: Tensor, count: int) -> Tensor:
    padded = values.new_zeros(len(values) + count, *values.shape[1:])
    padded[: len(values)] = values
    return padded
