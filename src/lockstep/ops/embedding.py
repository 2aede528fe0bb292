"""Token embedding under the bit contract: a gather; its gradient sums a token's rows in their order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def embedding(tokens: Tensor, weight: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Rows of weight [V, D] for tokens [T], in dtype, times scale (itself rounded to dtype, as Gemma does)."""
    rows: Tensor = _Embedding.apply(tokens, weight, dtype, scale)
    return rows


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
        rounded = torch.tensor(scale, dtype=dtype)
        tokens = tokens.to(torch.int64).contiguous()
        ctx.save_for_backward(tokens)
        ctx.vocabulary, ctx.scale, ctx.weight_dtype = weight.shape[0], float(rounded), weight.dtype
        rows = weight.detach()[tokens].to(dtype)
        return rows if scale == 1.0 else rows * rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        dw = torch.ops.lockstep.embedding_backward(grads[0].contiguous(), tokens, ctx.vocabulary, ctx.scale)
        return None, dw.to(ctx.weight_dtype), None, None
