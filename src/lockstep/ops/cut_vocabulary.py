"""The vocabulary as a tensor-parallel layout cuts it, in a fixed number of segments (contract C4).

With ``canonical_tp = N`` the rows of the embedding and of the head are cut into N segments of neighbouring tokens,
equal but for one token. A row's log-sum-exp is that of its segments' own N log-sum-exps, its entropy the sum of theirs
by the binary tree; the head's input gradient is N float32 products added by the tree and rounded once, as of a layer
cut by columns (`cut_linear`). A token's row of the embedding, and gradients of weights, are of the device that has the
token. So every degree that divides N gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.ops import plain
from lockstep.ops.cross_entropy import refuse_fractions, row_log_sum_exp, scaled_by, select_logprobs
from lockstep.ops.cut_linear import Add, alone, cut_operators
from lockstep.ops.embedding import embedding_part
from lockstep.ops.first_order import first_order
from lockstep.ops.head_parts import Asked, Gather, PartOfLoss, Segments, part_of_loss
from lockstep.ops.linear import refuse_gradient
from lockstep.ops.operators import Numerics, Operators

Part = Callable[[Tensor, Tensor, Tensor, Tensor, Asked], PartOfLoss]
"""`part_of_loss` of a device: (hidden, weight, targets, token_weights, what is asked)"""


def by_itself(tensor: Tensor) -> list[Tensor]:
    """The `Gather` of a single device."""
    return [tensor]


def cut_vocabulary(
    ops: Operators, segments: Segments, add: Add = alone, gather: Gather = by_itself, part: Part | None = None
) -> Operators:
    """The operators of a device that holds some segments; one segment leaves them as they are.

    Weights of the embedding and of the head have this device's rows; tokens and logits are of the whole vocabulary.
    add, gather: over the devices. part: what computes this device's part of the loss; by default `part_of_loss`.
    """
    if segments.count == 1:
        return ops
    how = _Cut(ops.numerics, add, part or partial(part_of_loss, ops.numerics, segments, gather))

    def loss(
        hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, z_loss: float = 0.0,
        softcap: float = 0.0, entropy: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        refuse_gradient("the weight of a token", token_weights)
        refuse_fractions("targets", targets)
        found = _Loss.apply(hidden, weight, targets, token_weights, z_loss, softcap, entropy, how)
        return tuple(found[: 3 if entropy else 2])

    def embedding(tokens: Tensor, weight: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        lookup = embedding_part if ops.numerics == "bitwise" else plain.embedding_part
        rows: Tensor = _Sum.apply(lookup(tokens, weight, dtype, scale, segments.first, segments.vocabulary), add)
        return rows

    place = f"{segments.first} and {segments.held} more of {segments.vocabulary} in {segments.count} segments"
    found = replace(ops, linear_cross_entropy=loss, tokens_as=place)
    if ops.numerics == "bitwise":
        by_segments = [partial(whole, segments=segments.count) for whole in (_log_softmax, select_logprobs)]
        found = replace(found, log_softmax=by_segments[0], select_logprobs=by_segments[1])
    return found if segments.here == segments.count else replace(found, embedding=embedding)


def in_segments(ops: Operators, segments: int, vocabulary: int) -> Operators:
    """The operators of a device that holds all of a model whose sums are made in so many segments."""
    by_tokens = cut_vocabulary(ops, Segments(vocabulary, segments, segments))
    return cut_operators(by_tokens, segments, segments, alone)


@dataclass(frozen=True)
class _Cut:
    numerics: Numerics
    add: Add
    part: Part


@first_order
class _Loss(Function):
    """As `cross_entropy._LinearCrossEntropy`: the gradients are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, z_loss: float, softcap: float,
        entropy: bool, how: _Cut,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        found = how.part(
            hidden.contiguous(), weight.contiguous(), targets.to(torch.int64).contiguous(),
            token_weights.contiguous(), Asked(z_loss, softcap, entropy, need_hidden, need_weight),
        )  # fmt: skip
        d_hidden = how.add(found.d_hidden, hidden.dtype) if need_hidden else None
        ctx.save_for_backward(d_hidden, found.d_weight)
        ctx.numerics, ctx.weight_dtype = how.numerics, weight.dtype
        ctx.mark_non_differentiable(found.logprobs, found.entropies)
        return found.loss, found.logprobs, found.entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        scaled = scaled_by if ctx.numerics == "bitwise" else _plainly_scaled
        d_hidden = scaled(d_hidden, grads[0], d_hidden.dtype) if need_hidden else None
        d_weight = scaled(d_weight, grads[0], ctx.weight_dtype) if need_weight else None
        return d_hidden, d_weight, None, None, None, None, None, None


@first_order
class _Sum(Function):
    """The rows of all devices' tokens; each needs the whole gradient of them, and has it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, add: Add) -> Tensor:
        return add(part, part.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def _plainly_scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * scale).to(dtype)


def _log_softmax(logits: Tensor, segments: int) -> Tensor:
    refuse_gradient("log_softmax", logits)
    return logits - row_log_sum_exp(logits.contiguous(), segments)[:, None]
