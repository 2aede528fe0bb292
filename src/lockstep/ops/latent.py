"""Latent attention (MLA, arXiv 2405.04434) over pages of latents, in its absorbed form. Order of sums: `csrc/attend.h`.

With the latents as one key head, and their first elements as its values, the packed `attention` gives the same bits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from lockstep.ops.attention import check_head_dim
from lockstep.ops.batch import LatentPages, Paged
from lockstep.ops.first_order import first_order
from lockstep.ops.linear import refuse_gradient
from lockstep.ops.raw import kernel


def write_latents(latents: Tensor, pages: LatentPages, batch: Paged) -> None:
    """Put the new latents [T, width] into the pages of their sequences."""
    table, starts, positions = batch.page_table, batch.starts, batch.positions
    kernel.write_latents(latents.contiguous(), pages.rows, table, starts, positions)


def latent_attention(q: Tensor, pages: LatentPages, batch: Paged, scale: float, v_dim: int) -> Tensor:
    """q [T, H, width] of new tokens over the latents of their sequences -> [T, H, v_dim], causal; without gradient.

    A head's output is the weighted sum of the first v_dim elements of the latents. width and v_dim must be multiples
    of 16 (LockstepError).
    """
    check_head_dim(q.shape[-1])
    check_head_dim(v_dim)
    refuse_gradient("attention over pages", q)
    out: Tensor = kernel.attention_latent(
        q.contiguous(), pages.rows, batch.page_table, batch.starts, batch.positions, v_dim, scale
    )
    return out


def share_heads(x: Tensor, heads: int) -> Tensor:
    """x [T, d] -> [T, heads, d], a copy for every head; the gradient sums the heads, ascending, and rounds once."""
    y: Tensor = _ShareHeads.apply(x, heads)
    return y


@first_order
class _ShareHeads(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int) -> Tensor:
        return kernel.share_heads(x.contiguous(), heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return kernel.share_heads_backward(grads[0].contiguous()), None
