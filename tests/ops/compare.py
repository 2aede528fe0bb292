"""Byte equality, and random tensors that do not depend on global state."""

import torch
from torch import Tensor


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements differ as raw bytes (two NaNs of one pattern are equal, +0 and -0 are not)."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    size = a.element_size()
    rows = lambda x: x.detach().reshape(-1).contiguous().view(torch.uint8).reshape(-1, size)  # noqa: E731
    return int((rows(a) != rows(b)).any(dim=1).sum())


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
