"""Kernels and programs read a weight where it lies, and write it there: its elements must follow one another."""

from __future__ import annotations

from torch import Tensor


def not_contiguous(name: str, weight: Tensor) -> str:
    """What is wrong with a weight whose elements do not follow one another, and what to do; nothing where they do."""
    if weight.is_contiguous():
        return ""
    return (
        f"{name} is not contiguous, {list(weight.shape)} with strides {weight.stride()}, as weights must be: set its "
        ".data to .data.contiguous()"
    )
