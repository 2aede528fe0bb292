"""Log-probabilities and the loss under the bit contract; the logits of a whole batch are never held.

Order of sums: `csrc/vocabulary.cpp`, `csrc/cross_entropy.cpp`. A log-probability is `logit - log_sum_exp(row)`, one
rounding, wherever it is computed: training, scoring and serving return the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.ops.first_order import first_order
from lockstep.ops.linear import refuse_gradient
from lockstep.ops.raw import kernel


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities float32 [T, V] of logits float32 [T, V]."""
    refuse_gradient("log_softmax", logits)
    y: Tensor = kernel.log_softmax(logits.contiguous())
    return y


def select_logprobs(logits: Tensor, tokens: Tensor, segments: int = 1) -> Tensor:
    """The entries of `log_softmax(logits)` at tokens [T], float32 [T], without the others. segments: of the vocabulary,
    as in `row_log_sum_exp`."""
    refuse_gradient("select_logprobs", logits)
    logits = logits.contiguous()
    chosen = logits.gather(-1, tokens.clamp(min=0).to(torch.int64)[:, None])[:, 0]
    return chosen - row_log_sum_exp(logits, segments)


def refuse_fractions(what: str, tokens: Tensor) -> None:
    """Raise where tokens would be cut to whole numbers in silence."""
    if tokens.is_floating_point():
        raise RuntimeError(f"{what} are {tokens.dtype}: expected whole numbers")


def row_log_sum_exp(logits: Tensor, segments: int) -> Tensor:
    """Of contiguous rows float32 [T, V], float32 [T]; that of their segments' own where there are several."""
    of_segments = kernel.log_sum_exp(logits, segments)
    whole: Tensor = of_segments if segments == 1 else kernel.log_sum_exp(of_segments, 1)
    return whole[:, 0]


def softcap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), logits float32: what `linear_cross_entropy` does with a soft cap."""
    refuse_gradient("softcap", logits)
    y: Tensor = kernel.softcap(logits.contiguous(), cap)
    return y


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, z_loss: float = 0.0, softcap: float = 0.0,
    entropy: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Weighted cross-entropy of hidden [T, D] times weight [V, D], a chunk of rows at a time.

    Returns (loss, logprobs), and with `entropy` the entropy of each row's distribution in nats as a third. loss is the
    float32 scalar sum over rows with target >= 0 of token_weights * (-logprob + z_loss * log_z^2) (z-loss: PaLM, arXiv
    2204.02311); logprobs and entropies float32 [T], detached. softcap: logits become softcap * tanh(logits / softcap)
    first (Gemma 2, arXiv 2408.00118); 0: they do not.
    The gradients are computed in the forward pass and scaled by the incoming gradient in the backward. token_weights
    have none: RuntimeError where they ask for one.
    """
    refuse_gradient("the weight of a token", token_weights)
    refuse_fractions("targets", targets)
    results = _LinearCrossEntropy.apply(hidden, weight, targets, token_weights, z_loss, softcap, entropy)
    return tuple(results[: 3 if entropy else 2])


@first_order
class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, z_loss: float, softcap: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        loss, logprobs, entropies, d_hidden, d_weight, _ = kernel.linear_cross_entropy(
            hidden.contiguous(), weight.contiguous(), targets.to(torch.int64).contiguous(),
            token_weights.contiguous(), z_loss, softcap, entropy, need_hidden, need_weight,
        )  # fmt: skip
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(logprobs, entropies)
        return loss, logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = scaled_by(d_hidden, grads[0], d_hidden.dtype) if need_hidden else None
        d_weight = scaled_by(d_weight, grads[0], ctx.weight_dtype) if need_weight else None
        return d_hidden, d_weight, None, None, None, None, None


def scaled_by(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x times the incoming gradient, in dtype. Exact rule: x * 1 = x for every float, so where the gradient is known
    to be 1, as after a plain `loss.backward()`, nothing is computed. In a captured graph its value is not known yet:
    the product stands there, for a pass to drop by the same rule."""
    if type(scale) is Tensor and not scale.is_meta and float(scale) == 1.0:
        return x.to(dtype)
    y: Tensor = kernel.scaled(x, scale, dtype)
    return y
