"""Operators on the vocabulary: `csrc/vocabulary.cpp`, `csrc/cross_entropy.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.ops.raw.define import define, same
from lockstep.ops.raw.linear import panels

HELD = 1 << 23
"""Logits held at a time (float32: 32 MiB), in an even number of rows; no bit depends on it."""


@define("embedding(Tensor tokens, Tensor weight, ScalarType dtype, float scale, int first, int vocabulary) -> Tensor")
def embedding(tokens: Tensor, weight: Tensor, dtype: torch.dtype, scale: float, first: int, vocabulary: int) -> Tensor:
    """tokens int64 [T] of a vocabulary, weight [v, D] of its tokens first .. first + v - 1 -> [T, D]: rows rounded to
    dtype, then times scale unless that is 1; rows of -0.0 for all other tokens."""
    return weight.new_empty(tokens.shape[0], weight.shape[1], dtype=dtype)


@define("embedding_backward(Tensor dy, Tensor tokens, int held, float scale, ScalarType dtype, int first) -> Tensor")
def embedding_backward(dy: Tensor, tokens: Tensor, held: int, scale: float, dtype: torch.dtype, first: int) -> Tensor:
    """dy [T, D], tokens int64 [T] -> [held, D], the rows of tokens first .. first + held - 1: sums in float32, rounded
    once to dtype."""
    return dy.new_empty(held, dy.shape[1], dtype=dtype)


@define("log_sum_exp(Tensor logits, int segments) -> Tensor")
def log_sum_exp(logits: Tensor, segments: int) -> Tensor:
    """float32 [T, V] -> float32 [T, segments]: of each segment of a row; the first V % segments have one element more
    than the others, as `torch.tensor_split` cuts."""
    return logits.new_empty(logits.shape[0], segments)


@define("entropies(Tensor logits, Tensor lse, int segments) -> Tensor")
def entropies(logits: Tensor, lse: Tensor, segments: int) -> Tensor:
    """float32 [T, V], float32 [T] -> float32 [T, segments]: each segment's sum of -p log p, in nats; p = exp(logit -
    lse)."""
    return logits.new_empty(logits.shape[0], segments)


@define(
    "cross_entropy_backward(Tensor logits, Tensor lse, Tensor targets, Tensor token_weights, float z_loss, "
    "float softcap, int first, ScalarType dtype) -> Tensor"
)
def cross_entropy_backward(
    logits: Tensor, lse: Tensor, targets: Tensor, token_weights: Tensor, z_loss: float, softcap: float, first: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The loss's gradient of the logits float32 [T, v] of tokens first .. first + v - 1, in dtype. lse float32 [T]: of
    whole rows; targets int64 [T]: of the whole vocabulary."""
    return torch.empty_like(logits, dtype=dtype)


@define("log_softmax(Tensor logits) -> Tensor")
def log_softmax(logits: Tensor) -> Tensor:
    """float32 [T, V] -> float32 [T, V]."""
    return torch.empty_like(logits)


@define("softcap(Tensor logits, float cap) -> Tensor")
def softcap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), float32 of any shape."""
    return torch.empty_like(logits)


@define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, Tensor token_weights, float z_loss, "
    "float softcap, bool entropy, bool hidden_gradient, bool weight_gradient) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, z_loss: float, softcap: float,
    entropy: bool, hidden_gradient: bool, weight_gradient: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """loss float32 [], logprobs float32 [T], entropies float32 [T], d_hidden [T, D], d_weight float32 [V, D], and the
    bytes it worked in, which nobody reads. A result that is not asked for has no element."""
    same("weight's width", weight.shape[1], hidden.shape[1])
    same("targets", tuple(targets.shape), (hidden.shape[0],))
    rows = hidden.shape[0]
    bytes_ = workspace(rows, hidden.shape[1], weight.shape[0], hidden.element_size(), hidden_gradient, weight_gradient)
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(rows, dtype=torch.float32),
        hidden.new_empty(rows if entropy else 0, dtype=torch.float32),
        hidden.new_empty(hidden.shape if hidden_gradient else (0,)),
        hidden.new_empty(weight.shape if weight_gradient else (0,), dtype=torch.float32),
        hidden.new_empty(bytes_, dtype=torch.uint8),
    )


def workspace(rows: int, width: int, vocabulary: int, size: int, hidden_gradient: bool, weight_gradient: bool) -> int:
    """Bytes that `linear_cross_entropy` works in (`csrc/bindings_vocabulary.h` cuts them in this order); size: of an
    element of hidden."""
    step = min(rows, max(32, HELD // vocabulary // 32 * 32))
    parts = [panels(vocabulary) * 16 * width * size, 4 * step * vocabulary, 4 * step, 4 * rows]
    if hidden_gradient:
        parts.append(panels(width) * 16 * vocabulary * size)
    if weight_gradient:
        parts.append(panels(width) * 16 * step * size)
    return sum((part + 63) // 64 * 64 for part in parts)


@define("scaled(Tensor x, Tensor scale, ScalarType dtype) -> Tensor")
def scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x times scale (float32 []), one product in float32 rounded to dtype. With scale 1 that is x: x * 1 = x."""
    return torch.empty_like(x, dtype=dtype)
