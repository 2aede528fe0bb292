"""Log-probabilities and the loss under the bit contract; the logits of a whole batch are never held.

Order of sums: `csrc/vocabulary.cpp`. A log-probability is `logit - log_sum_exp(row)`, one rounding, wherever it is
computed: training, scoring and serving return the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.ops.linear import PackedWeight, linear, pack, refuse_gradient, weight_gradient

_CHUNK = 1 << 23
"""Logits held at a time (float32: 32 MiB). Rows are independent, so this changes no bit."""


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities float32 [T, V] of logits float32 [T, V]."""
    refuse_gradient("log_softmax", logits)
    y: Tensor = torch.ops.lockstep.log_softmax(logits.contiguous())
    return y


def select_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The entries of `log_softmax(logits)` at tokens [T], float32 [T], without the others."""
    refuse_gradient("select_logprobs", logits)
    logits = logits.contiguous()
    return _chosen(logits, tokens) - torch.ops.lockstep.log_sum_exp(logits)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of hidden [T, D] times weight [V, D], a chunk of rows at a time.

    Returns (loss, logprobs). loss is the float32 scalar sum over rows with target >= 0 of
    token_weights * (-logprob + z_loss * log_z^2) (z-loss: PaLM, arXiv 2204.02311); logprobs float32 [T], detached.
    The gradients are computed in the forward pass and scaled by the incoming gradient in the backward.
    """
    loss, logprobs = _LinearCrossEntropy.apply(hidden, weight, targets, token_weights, z_loss)
    return loss, logprobs


def _chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(-1, tokens.clamp(min=0).to(torch.int64)[:, None])[:, 0]


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        hidden, targets = hidden.contiguous(), targets.to(torch.int64).contiguous()
        packed = pack(weight, hidden.dtype)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        rows_of_weight = (
            torch.ops.lockstep.pack_rows(weight.detach().contiguous(), hidden.dtype) if need_hidden else None
        )
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32) if need_weight else None
        logprobs, losses = torch.empty(len(hidden)), torch.empty(len(hidden), 1)
        step = max(16, _CHUNK // weight.shape[0])
        for at in range(0, len(hidden), step):
            rows = slice(at, min(at + step, len(hidden)))
            chunk = _Chunk(hidden[rows], packed, targets[rows], token_weights[rows].contiguous(), z_loss)
            logprobs[rows], losses[rows, 0] = chunk.logprobs, chunk.losses
            if need_hidden or need_weight:
                d_logits = chunk.gradient()
                if d_hidden is not None:
                    d_hidden[rows] = torch.ops.lockstep.gemm(
                        d_logits, rows_of_weight, weight.shape[1], None, hidden.dtype
                    )
                if d_weight is not None:
                    weight_gradient(d_logits, hidden[rows], out=d_weight)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(logprobs)
        return torch.ops.lockstep.column_sums(losses)[0], logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        scale = grads[0]
        d_hidden = None if d_hidden is None else d_hidden * scale.to(d_hidden.dtype)
        d_weight = None if d_weight is None else (d_weight * scale).to(ctx.weight_dtype)
        return d_hidden, d_weight, None, None, None


class _Chunk:
    """Logits of some rows, their losses and log-probabilities, and the gradient of the logits."""

    def __init__(self, hidden: Tensor, packed: PackedWeight, targets: Tensor, weights: Tensor, z_loss: float) -> None:
        self.dtype, self.targets, self.weights, self.z_loss = hidden.dtype, targets, weights, z_loss
        self.logits = linear(hidden, packed, out_dtype=torch.float32)
        self.log_z = torch.ops.lockstep.log_sum_exp(self.logits)
        self.logprobs = _chosen(self.logits, targets) - self.log_z
        losses = (self.log_z * self.log_z * z_loss - self.logprobs) * weights
        self.losses = torch.where(targets >= 0, losses, torch.zeros_like(losses))

    def gradient(self) -> Tensor:
        return torch.ops.lockstep.cross_entropy_backward(
            self.logits, self.log_z, self.targets, self.weights, self.z_loss, self.dtype
        )
