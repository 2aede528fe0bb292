"""Mixture of experts: `csrc/router.cpp`, `csrc/moe.cpp`. T tokens, each of which goes to K of E experts.

Grouped order: by expert, then by token. offsets int32 [E + 1]: where an expert's rows begin; rows int32 [T K]: the
token of each row; slots int32 [T, K]: the row of each choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.ops.raw.define import define, same
from lockstep.ops.raw.linear import panels


@define(
    "route(Tensor logits, Tensor? bias, int top_k, bool sigmoid, bool normalize, int groups, int top_groups, "
    "bool pairs, float scale) -> (Tensor, Tensor)"
)
def route(
    logits: Tensor, bias: Tensor | None, top_k: int, sigmoid: bool, normalize: bool, groups: int, top_groups: int,
    pairs: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """logits float32 [T, E], bias float32 [E] -> weights float32 [T, K], chosen int32 [T, K], ascending."""
    return logits.new_empty(logits.shape[0], top_k), logits.new_empty(logits.shape[0], top_k, dtype=torch.int32)


@define(
    "route_backward(Tensor d_weights, Tensor logits, Tensor chosen, bool sigmoid, bool normalize, float scale) "
    "-> Tensor"
)
def route_backward(
    d_weights: Tensor, logits: Tensor, chosen: Tensor, sigmoid: bool, normalize: bool, scale: float
) -> Tensor:
    """d_logits float32 [T, E]."""
    same("d_weights", tuple(d_weights.shape), tuple(chosen.shape))
    return torch.empty_like(logits)


@define("softmax_sums(Tensor logits) -> Tensor")
def softmax_sums(logits: Tensor) -> Tensor:
    """logits float32 [T, E] -> float32 [E], the sums of softmax over the tokens."""
    return logits.new_empty(logits.shape[1])


@define("softmax_sums_backward(Tensor d_sums, Tensor logits) -> Tensor")
def softmax_sums_backward(d_sums: Tensor, logits: Tensor) -> Tensor:
    """d_logits float32 [T, E]."""
    same("d_sums", tuple(d_sums.shape), (logits.shape[1],))
    return torch.empty_like(logits)


@define("balance_share(Tensor[] offsets, int rows) -> Tensor")
def balance_share(offsets: Sequence[Tensor], rows: int) -> Tensor:
    """offsets int32 [E + 1] of every layer, rows of all layers together -> float32 [E]: choices of an expert over all
    layers, times E / rows^2."""
    return offsets[0].new_empty(offsets[0].shape[0] - 1, dtype=torch.float32)


@define("group(Tensor chosen, int experts) -> (Tensor, Tensor, Tensor)")
def group(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """chosen int32 [T, K] -> offsets, rows, slots: a stable counting sort."""
    return chosen.new_empty(experts + 1), chosen.new_empty(chosen.numel()), torch.empty_like(chosen)


@define("dispatch(Tensor x, Tensor rows) -> Tensor")
def dispatch(x: Tensor, rows: Tensor) -> Tensor:
    """x [T, D] -> x[rows]."""
    return x.new_empty(rows.shape[0], x.shape[1])


@define("dispatch_backward(Tensor dy, Tensor slots) -> Tensor")
def dispatch_backward(dy: Tensor, slots: Tensor) -> Tensor:
    """dy [R, D], slots int32 [T, K] -> [T, D]: the sums of dy[slots], ascending."""
    return dy.new_empty(slots.shape[0], dy.shape[1])


@define("combine(Tensor y, Tensor weights, Tensor slots) -> Tensor")
def combine(y: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """y [T K, D], weights float32 [T, K] -> [T, D]: the weighted sums of y[slots], ascending."""
    same("weights", tuple(weights.shape), tuple(slots.shape))
    return y.new_empty(slots.shape[0], y.shape[1])


@define("combine_backward(Tensor d_out, Tensor y, Tensor weights, Tensor slots) -> (Tensor, Tensor)")
def combine_backward(d_out: Tensor, y: Tensor, weights: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """dy [T K, D], d_weights float32 [T, K]."""
    same("weights", tuple(weights.shape), tuple(slots.shape))
    same("y", tuple(y.shape), (slots.numel(), d_out.shape[1]))
    return torch.empty_like(y), torch.empty_like(weights)


@define("grouped_gemm(Tensor a, Tensor offsets, Tensor[] packed, int n) -> Tensor")
def grouped_gemm(a: Tensor, offsets: Tensor, packed: Sequence[Tensor], n: int) -> Tensor:
    """a [R, k], the rows of each expert with its own packed weight (n columns) -> [R, n]."""
    same("offsets", offsets.shape[0], len(packed) + 1)
    same("packed", tuple(packed[0].shape), (panels(n), a.shape[1], 16))
    return a.new_empty(a.shape[0], n)


@define("grouped_product(Tensor a, Tensor offsets, Tensor[] weights, bool by_rows) -> Tensor")
def grouped_product(a: Tensor, offsets: Tensor, weights: Sequence[Tensor], by_rows: bool) -> Tensor:
    """a [R, k] with weights [n, k] transposed, or by_rows [k, n] -> [R, n]."""
    same("offsets", offsets.shape[0], len(weights) + 1)
    same("depth", weights[0].shape[0 if by_rows else 1], a.shape[1])
    return a.new_empty(a.shape[0], weights[0].shape[1 if by_rows else 0])


@define(
    "grouped_gated(Tensor a, Tensor offsets, Tensor[] gates, Tensor[] ups, int n, int activation, bool keep) "
    "-> (Tensor, Tensor, Tensor)"
)
def grouped_gated(
    a: Tensor, offsets: Tensor, gates: Sequence[Tensor], ups: Sequence[Tensor], n: int, activation: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """a [R, k], packed gates and ups of n columns -> y [R, n], and with `keep` the two products (else [0, n])."""
    same("offsets", offsets.shape[0], len(gates) + 1)
    for name, packed in (("gate", gates[0]), ("up", ups[0])):
        same(name, tuple(packed.shape), (panels(n), a.shape[1], 16))
    return _gated(a, n, keep)


@define(
    "grouped_gated_product(Tensor a, Tensor offsets, Tensor[] gates, Tensor[] ups, int activation, bool keep) "
    "-> (Tensor, Tensor, Tensor)"
)
def grouped_gated_product(
    a: Tensor, offsets: Tensor, gates: Sequence[Tensor], ups: Sequence[Tensor], activation: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`grouped_gated` with weights [n, k]."""
    same("offsets", offsets.shape[0], len(gates) + 1)
    for name, weight in (("gate", gates[0]), ("up", ups[0])):
        same(name, tuple(weight.shape), (gates[0].shape[0], a.shape[1]))
    return _gated(a, gates[0].shape[0], keep)


def _gated(a: Tensor, n: int, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    kept = a.shape[0] if keep else 0
    return a.new_empty(a.shape[0], n), a.new_empty(kept, n), a.new_empty(kept, n)


@define("grouped_weight_gradient(Tensor dy, Tensor x, Tensor offsets) -> Tensor")
def grouped_weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """dy [R, n], x [R, k] -> float32 [E, n, k]; zero for an expert without rows."""
    same("dy's rows", dy.shape[0], x.shape[0])
    return dy.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1], dtype=torch.float32)
