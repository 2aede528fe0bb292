"""Paged attention under `numerics: fast`: kernels for pages in eight bits, plain PyTorch for the others."""

from __future__ import annotations

from torch import Tensor

from lockstep.ops import int8_pages, plain
from lockstep.ops.batch import Int8Pages, KVPages, Paged


def write_kv(k: Tensor, v: Tensor, pages: KVPages | Int8Pages, batch: Paged) -> None:
    """`Operators.write_kv`."""
    if isinstance(pages, Int8Pages) and int8_pages.has_kernels():
        return int8_pages.write_kv(k, v, pages, batch)
    plain.write_kv(k, v, pages, batch)


def paged_attention(
    q: Tensor, pages: KVPages | Int8Pages, batch: Paged, scale: float, window: int | None = None, softcap: float = 0.0
) -> Tensor:
    """`Operators.paged_attention`. Where a width of heads is none the kernel takes, or there is no compiler, PyTorch
    reads pages in eight bits as well."""
    if isinstance(pages, Int8Pages) and q.shape[-1] % 16 == 0 and int8_pages.has_kernels():
        return int8_pages.paged_attention(q, pages, batch, scale, window or 0, softcap)
    return plain.paged_attention(q, pages, batch, scale, window, softcap)
