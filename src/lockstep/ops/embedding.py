"""Token embedding under the bit contract: a gather; its gradient sums a token's rows in their order."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.ops.cross_entropy import refuse_fractions
from lockstep.ops.first_order import first_order
from lockstep.ops.raw import kernel


def embedding(tokens: Tensor, weight: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Rows of weight [V, D] for tokens [T], in dtype, times scale (itself rounded to dtype, as Gemma does)."""
    return embedding_part(tokens, weight, dtype, scale, 0, weight.shape[0])


def embedding_part(
    tokens: Tensor, weight: Tensor, dtype: torch.dtype, scale: float, first: int, vocabulary: int
) -> Tensor:
    """`embedding` by a weight [v, D] of tokens first .. first + v - 1 of a vocabulary; rows of -0.0 for the others, so
    that the sum with what another device has is that device's row, bit for bit."""
    refuse_fractions("tokens", tokens)
    rows: Tensor = _Embedding.apply(tokens, weight, dtype, scale, first, vocabulary)
    return rows


def _rounded(scale: float, dtype: torch.dtype) -> float:
    """scale rounded to float32 or bfloat16, without a tensor: it is known while a graph is captured."""
    bits = struct.unpack("<I", struct.pack("<f", scale))[0]
    if dtype == torch.bfloat16:  # to nearest, ties to even
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


@first_order
class _Embedding(Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, dtype: torch.dtype, scale: float, first: int, vocabulary: int
    ) -> Tensor:
        tokens = tokens.to(torch.int64).contiguous()
        ctx.save_for_backward(tokens)
        ctx.held, ctx.scale, ctx.weight_dtype, ctx.first = weight.shape[0], _rounded(scale, dtype), weight.dtype, first
        return kernel.embedding(tokens, weight.contiguous(), dtype, ctx.scale, first, vocabulary)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        dy = grads[0].contiguous()
        dw = kernel.embedding_backward(dy, tokens, ctx.held, ctx.scale, ctx.weight_dtype, ctx.first)
        return None, dw, None, None, None, None
