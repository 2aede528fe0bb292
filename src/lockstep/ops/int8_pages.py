"""Keys and values in eight bits: half of bfloat16's memory, for `numerics: fast` alone.

Each head of each token has a scale of its own, its largest magnitude over 127, so that a token is written once and
never again, whatever comes after it. What is read back is wrong by at most half a step, 1/254 of that magnitude.

`write_kv` and `paged_attention` are kernels (`csrc/attention_int8.cpp`); `write` and `read` say the same in PyTorch,
for tests and for a machine without a compiler.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.ops import build
from lockstep.ops.batch import Int8Pages, Paged
from lockstep.ops.raw import kernel


@lru_cache
def has_kernels() -> bool:
    """Whether the kernels can be used: they are built on first use, where there is a compiler."""
    try:
        build.load()
    except LockstepError:
        return False
    return True


def write_kv(k: Tensor, v: Tensor, pages: Int8Pages, batch: Paged) -> None:
    """Quantise k [T, H, d] and v [T, H, e] into the pages of their sequences."""
    kernel.write_kv_int8(
        k.contiguous(), v.contiguous(), *_tensors(pages), batch.page_table, batch.starts, batch.positions
    )


def paged_attention(q: Tensor, pages: Int8Pages, batch: Paged, scale: float, window: int, softcap: float) -> Tensor:
    """q [T, Hq, d] over the pages of their sequences -> [T, Hq, e]; window and softcap 0: none."""
    out: Tensor = kernel.attention_paged_int8(
        q.contiguous(), *_tensors(pages), batch.page_table, batch.starts, batch.positions, scale, window, softcap
    )
    return out


def _tensors(pages: Int8Pages) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return pages.k, pages.v, pages.k_scale, pages.v_scale


def write(k: Tensor, v: Tensor, pages: Int8Pages, page: Tensor, offset: Tensor) -> None:
    """Quantise k [T, H, d] and v [T, H, e] into their places, page [T] and offset [T] in it."""
    pages.k[page, :, :, offset], pages.k_scale[page, :, offset] = _quantised(k)
    pages.v[page, :, offset], pages.v_scale[page, :, offset] = _quantised(v)


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1).float() / 127
    steps = x.float() / torch.where(scale == 0, 1.0, scale)[..., None]
    return steps.round().to(torch.int8), scale


def read(pages: Int8Pages, table: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first `count` keys [count, H, d] and values [count, H, e] of the sequence with page table [P], in dtype."""

    def one(store: Tensor, scales: Tensor) -> Tensor:  # store [P, H, PAGE, width]
        values = store.float() * scales[table][..., None]
        return values.transpose(1, 2).flatten(0, 1)[:count].to(dtype)

    return one(pages.k[table].transpose(2, 3), pages.k_scale), one(pages.v[table], pages.v_scale)
