"""Token embedding under the bit contract: a gather; its gradient sums a token's rows in their order."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def embedding(tokens: Tensor, weight: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Rows of weight [V, D] for tokens [T], in dtype, times scale (itself rounded to dtype, as Gemma does)."""
    rows: Tensor = _Embedding.apply(tokens, weight, dtype, scale)
    return rows


def _rounded(scale: float, dtype: torch.dtype) -> float:
    """scale rounded to float32 or bfloat16, without a tensor: it is known while a graph is captured."""
    bits = struct.unpack("<I", struct.pack("<f", scale))[0]
    if dtype == torch.bfloat16:  # to nearest, ties to even
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
        tokens = tokens.to(torch.int64).contiguous()
        ctx.save_for_backward(tokens)
        ctx.vocabulary, ctx.scale, ctx.weight_dtype = weight.shape[0], _rounded(scale, dtype), weight.dtype
        return torch.ops.lockstep.embedding(tokens, weight.contiguous(), dtype, ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        dy = grads[0].contiguous()
        dw = torch.ops.lockstep.embedding_backward(dy, tokens, ctx.vocabulary, ctx.scale, ctx.weight_dtype)
        return None, dw, None, None
