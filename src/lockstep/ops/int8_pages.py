"""Keys and values in eight bits: half of bfloat16's memory, for `numerics: fast` alone.

Each head of each token has a scale of its own, its largest magnitude over 127, so that a token is written once and
never again, whatever comes after it. What is read back is wrong by at most half a step, 1/254 of that magnitude.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.ops.batch import Int8Pages


def write(k: Tensor, v: Tensor, pages: Int8Pages, page: Tensor, offset: Tensor) -> None:
    """Quantise k, v [T, H, d] into their places, page [T] and offset [T] in it."""
    for x, store, scales in ((k, pages.k, pages.k_scale), (v, pages.v, pages.v_scale)):
        scale = x.abs().amax(-1).float() / 127
        steps = x.float() / torch.where(scale == 0, 1.0, scale)[..., None]
        store[page, :, offset] = steps.round().to(torch.int8)
        scales[page, :, offset] = scale


def read(pages: Int8Pages, table: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first `count` keys and values [count, H, d] of the sequence with this page table [P], in dtype."""

    def one(store: Tensor, scales: Tensor) -> Tensor:
        values = store[table].float() * scales[table][..., None]
        return values.transpose(1, 2).flatten(0, 1)[:count].to(dtype)

    return one(pages.k, pages.k_scale), one(pages.v, pages.v_scale)
