"""A decoder block as one would write it in plain eager PyTorch around the same raw operators: what O0 may cost at most.

Each operator is an `autograd.Function` of its forward and backward, and nothing stands around them: no operators that
are passed, no modes, no caches, no batch. The bits are those of the block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from lockstep.config import ModelConfig

RAW = torch.ops.lockstep


class PlainBlock(nn.Module):
    """A Llama block in float32 with the weights of ours. starts, positions: of the packed sequences."""

    def __init__(self, config: ModelConfig, ours: nn.Module, starts: Tensor, positions: Tensor, table: Tensor) -> None:
        super().__init__()
        self.eps, self.scale, self.width = config.norm_eps, config.scale, config.head_dim
        self.starts, self.positions, self.table = starts, positions, table
        own = {name: nn.Parameter(p.detach().clone()) for name, p in ours.named_parameters()}
        self.norm1, self.norm2 = own["attn_norm.weight"], own["mlp_norm.weight"]
        self.q, self.k, self.v, self.o = (own[f"attn.{name}.weight"] for name in "qkvo")
        self.gate, self.up, self.down = (own[f"mlp.{name}.weight"] for name in ("gate", "up", "down"))

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D]."""
        h = _Norm.apply(x, self.norm1, self.eps)
        q, k, v = (_Linear.apply(h, weight).view(len(x), -1, self.width) for weight in (self.q, self.k, self.v))
        q, k = _Rope.apply(q, self.positions, self.table), _Rope.apply(k, self.positions, self.table)
        y = _Attention.apply(q, k, v, self.starts, self.positions, self.scale)
        x = x + _Linear.apply(y.view(len(x), -1), self.o)
        h = _Norm.apply(x, self.norm2, self.eps)
        return x + _Linear.apply(_Gated.apply(_Linear.apply(h, self.gate), _Linear.apply(h, self.up)), self.down)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return RAW.gemm(x, RAW.pack_columns(weight, x.dtype), weight.shape[0], None, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), dy = ctx.saved_tensors, grads[0].contiguous()
        dx = RAW.gemm(dy, RAW.pack_rows(weight, dy.dtype), weight.shape[1], None, dy.dtype)
        return dx, RAW.gemm_transposed(dy, RAW.pack_rows(x, x.dtype), x.shape[1])


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = RAW.rms_norm(x, weight, eps, 0.0)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        return *RAW.rms_norm_backward(grads[0], x, weight, rstd, 0.0), None


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(positions, table)
        return RAW.rope(x, positions, table, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return RAW.rope(grads[0], *ctx.saved_tensors, -1.0), None, None


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, positions: Tensor, scale: float) -> Tensor:
        out, lse = RAW.attention_packed(q, k, v, starts, positions, scale, 0, 0.0)
        ctx.save_for_backward(q, k, v, out, lse, starts, positions)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *RAW.attention_backward(grads[0], *ctx.saved_tensors, ctx.scale, 0, 0.0), None, None, None


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return RAW.gated(gate, up, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return RAW.gated_backward(grads[0], *ctx.saved_tensors, 0)
