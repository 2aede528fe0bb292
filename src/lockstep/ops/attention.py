"""Causal attention under the bit contract: packed for training, paged for serving, one inner loop.

Order of sums: `csrc/attention.cpp`, `csrc/attention_backward.cpp`. The forward saves only the output and the
log-sum-exp; the backward recomputes the probabilities (FlashAttention, arXiv 2205.14135).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from lockstep.errors import LockstepError
from lockstep.ops.batch import KVPages, Packed, Paged
from lockstep.ops.first_order import first_order
from lockstep.ops.linear import refuse_gradient
from lockstep.ops.raw import kernel


def attention(
    q: Tensor, k: Tensor, v: Tensor, batch: Packed, scale: float, window: int | None = None, softcap: float = 0.0
) -> Tensor:
    """q [T, Hq, d] over k [T, Hkv, d] and v [T, Hkv, e] of the same packed sequences -> [T, Hq, e].

    window: a query sees the last `window` keys, itself included. softcap: scores become softcap * tanh(score /
    softcap), 0: they do not (Gemma 2, arXiv 2408.00118). d and e must be multiples of 16 (LockstepError).
    """
    check_head_dim(q.shape[-1])
    check_head_dim(v.shape[-1])
    out: Tensor = _Attention.apply(q, k, v, batch, scale, window or 0, softcap)
    return out


def write_kv(k: Tensor, v: Tensor, pages: KVPages, batch: Paged) -> None:
    """Put the new keys [T, Hkv, d] and values [T, Hkv, e] into the pages of their sequences."""
    check_head_dim(k.shape[-1])
    check_head_dim(v.shape[-1])
    table, starts, positions = batch.page_table, batch.starts, batch.positions
    kernel.write_kv(k.contiguous(), v.contiguous(), pages.k, pages.v, table, starts, positions)


def paged_attention(
    q: Tensor, pages: KVPages, batch: Paged, scale: float, window: int | None = None, softcap: float = 0.0
) -> Tensor:
    """q [T, Hq, d] of new tokens over the pages of their sequences -> [T, Hq, e]; without gradient."""
    check_head_dim(q.shape[-1])
    refuse_gradient("paged attention", q)
    out: Tensor = kernel.attention_paged(
        q.contiguous(), pages.k, pages.v, batch.page_table, batch.starts, batch.positions, scale, window or 0, softcap
    )
    return out


def check_head_dim(head_dim: int, name: str = "head_dim") -> None:
    """LockstepError for a width of heads that the kernels do not take."""
    if head_dim % 16:
        raise LockstepError(
            f"{name} is {head_dim}; the attention kernel takes multiples of 16. Change {name}, or use plain "
            "PyTorch with --numerics fast (in training: --set train.numerics=fast), which takes any size but does not "
            "keep the bit contract."
        )


@first_order
class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, batch: Packed, scale: float, window: int, softcap: float
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = kernel.attention_packed(q, k, v, batch.starts, batch.positions, scale, window, softcap)
        ctx.save_for_backward(q, k, v, out, lse, batch.starts, batch.positions)
        ctx.scale, ctx.window, ctx.softcap = scale, window, softcap
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = kernel.attention_backward(grad, *saved, ctx.scale, ctx.window, ctx.softcap)
        return dq, dk, dv, None, None, None, None
