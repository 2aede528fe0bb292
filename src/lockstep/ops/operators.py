"""The operators a model asks for, bound to one numerics mode: the only thing a block computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.ops import build, fast_paged, plain, plain_moe
from lockstep.ops.adamw import adamw, square_sum
from lockstep.ops.attention import attention, paged_attention, write_kv
from lockstep.ops.batch import Routes
from lockstep.ops.cross_entropy import linear_cross_entropy, log_softmax, select_logprobs, softcap
from lockstep.ops.dequantize import dequantize
from lockstep.ops.embedding import embedding
from lockstep.ops.gated import gated
from lockstep.ops.latent import latent_attention, share_heads, write_latents
from lockstep.ops.linear import linear, pack_to_keep
from lockstep.ops.moe import balance_loss, combine, dispatch, grouped_gated, grouped_linear, route
from lockstep.ops.norm import rms_norm
from lockstep.ops.rope import rope
from lockstep.ops.row_share import RowShare

Numerics = Literal["bitwise", "fast"]
Split = Literal["columns", "rows", "vocabulary"]


@dataclass(frozen=True)
class CutProduct:
    """How a weight that tensor parallelism cuts is multiplied: operators like ``linear`` and ``pack``."""

    linear: Any
    pack: Callable[..., Any]


@dataclass(frozen=True)
class Operators:
    """The operators under one numerics mode (`operators` makes it). T rows (tokens), S sequences.

    Compute dtype is that of the activations, bfloat16 or float32; every weight is rounded to it at use,
    so a float32 master weight and its bfloat16 export give the same bits. Reductions are in float32.
    """

    numerics: Numerics

    linear: Callable[..., Tensor]
    """(x [T, K], weight [N, K] or what `pack` gave, bias [N] or None, out_dtype=None) -> [T, N]"""
    pack: Callable[..., Any]
    """(weight [N, K], dtype) -> the weight laid out for inference; only `linear` reads it, without gradient"""
    rms_norm: Callable[..., Tensor]
    """(x [..., D], weight [D], eps, offset=0.0, out_dtype=None) -> [..., D]: x / rms(x) * (weight + offset)"""
    rope: Callable[..., Tensor]
    """(x [T, H, d], positions int32 [T], table float32 [P, d / 2, 2] of cos and sin) -> [T, H, d] (half-split)"""
    gated: Callable[..., Tensor]
    """(gate [T, F], up [T, F], activation: "silu" or "gelu_tanh") -> activation(gate) * up"""
    embedding: Callable[..., Tensor]
    """(tokens [T], weight [V, D], dtype, scale=1.0) -> [T, D] in dtype; scale is rounded to dtype first"""
    attention: Callable[..., Tensor]
    """(q [T, Hq, d], k [T, Hkv, d], v [T, Hkv, e], batch: Packed, scale, window=None, softcap=0.0) -> [T, Hq, e]"""
    write_kv: Callable[..., None]
    """(k [T, Hkv, d], v [T, Hkv, e], pages: KVPages, batch: Paged): put new keys and values in their pages"""
    paged_attention: Callable[..., Tensor]
    """(q [T, Hq, d], pages: KVPages, batch: Paged, scale, window=None, softcap=0.0) -> [T, Hq, e], causal"""
    log_softmax: Callable[..., Tensor]
    """(logits float32 [T, V]) -> float32 [T, V]"""
    select_logprobs: Callable[..., Tensor]
    """(logits float32 [T, V], tokens [T]) -> float32 [T]: the bits of log_softmax's entry"""
    linear_cross_entropy: Callable[..., tuple[Tensor, ...]]
    """(hidden [T, D], weight [V, D], targets int64 [T], token_weights float32 [T], z_loss=0.0, softcap=0.0,
    entropy=False) -> (loss, logprobs), with entropy (loss, logprobs, entropies float32 [T], detached)

    loss = sum over rows with target >= 0 of token_weights * (-logprob + z_loss * log_z ** 2), a float32 scalar;
    logprobs float32 [T] (detached), the bits of select_logprobs on the same logits."""
    adamw: Callable[..., None]
    """(p, g, m, v, factors: AdamWFactors): one AdamW update in place; the same bits in both modes"""
    square_sum: Callable[..., Tensor]
    """(x) -> float64 scalar, the sum of squares by a fixed tree; the same bits in both modes"""
    dequantize: Callable[..., None]
    """(blocks uint8, name of a ggml format, out): fill out, float32 or bfloat16; the same bits in both modes"""
    route: Callable[..., Routes]
    """(logits float32 [T, E], routing: Routing, bias float32 [E] or None) -> Routes: experts and weights"""
    dispatch: Callable[..., Tensor]
    """(x [T, D], routes: Routes) -> [T k, D]: a row for each choice, by expert, then by token"""
    grouped_linear: Callable[..., Tensor]
    """(x [R, K], E weights [N, K] or what `pack` gave, offsets int32 [E + 1]) -> [R, N]: `linear` of each group of rows
    with its weight"""
    grouped_gated: Callable[..., Tensor]
    """(x [R, K], E gates and E ups, each [F, K] or what `pack` gave, offsets, activation) -> [R, F]: `gated` of both
    grouped products"""
    combine: Callable[..., Tensor]
    """(y [T k, D], routes: Routes) -> [T, D]: the weighted sum over a token's experts, ascending"""
    balance_loss: Callable[..., Tensor]
    """(logits float32 [T, E] of each layer, offsets of its Routes) -> float32 scalar, E sum_e f_e p_e"""
    write_latents: Callable[..., None]
    """(latents [T, L], pages: LatentPages, batch: Paged): put new latents in their pages"""
    latent_attention: Callable[..., Tensor]
    """(q [T, H, L], pages: LatentPages, batch: Paged, scale, v_dim) -> [T, H, v_dim]: the latents are the key of every
    head, their first v_dim elements its value; the bits of `attention` with one key head"""
    share_heads: Callable[..., Tensor]
    """(x [T, d], heads) -> [T, heads, d]: a copy for every head"""
    softcap: Callable[..., Tensor]
    """(logits float32, cap) -> cap * tanh(logits / cap)"""
    cut: Mapping[Split, CutProduct] = field(default_factory=dict)
    """The products of weights that tensor parallelism cuts; empty: nothing is cut, and ``linear`` computes them"""
    experts: Callable[..., Tensor] | None = None
    """(rows that `dispatch` gave, gates, ups, downs, `Routes.groups`, activation) -> rows for `combine`: a layer's
    experts where each device has some of them; None: the grouped products above"""
    cut_as: str = ""
    """How they are cut, in words: what a compiled program of these operators depends on beyond ``numerics``"""
    tokens_as: str = ""
    """Which tokens' rows of embedding and head are here, in words: what programs of those two depend on, too"""
    share: RowShare = field(default_factory=RowShare)
    """The rows of a micro-batch that graphs of these operators are captured for"""


def operators(numerics: Numerics = "bitwise", kernels: bool = True) -> Operators:
    """The operators under a numerics mode: `bitwise` runs the contract kernels, `fast` plain PyTorch.

    The kernels are built on first use (`ops.build`); LockstepError says so when there is no compiler. With kernels
    False nothing is built: the contract operators then take meta and fake tensors only (a dry run, a capture).
    """
    if numerics == "fast":
        return _PLAIN
    if numerics != "bitwise":
        raise LockstepError(f"numerics is {numerics!r}: give bitwise, or fast for plain PyTorch.")
    if kernels:
        build.load()
    return _CONTRACT


_PLAIN = Operators(
    "fast", plain.linear, plain.pack, plain.rms_norm, plain.rope, plain.gated, plain.embedding, plain.attention,
    fast_paged.write_kv, fast_paged.paged_attention, plain.log_softmax, plain.select_logprobs,
    plain.linear_cross_entropy, plain.adamw, plain.square_sum, plain.dequantize, plain_moe.route, plain_moe.dispatch,
    plain_moe.grouped_linear, plain_moe.grouped_gated, plain_moe.combine, plain_moe.balance_loss,
    plain_moe.write_latents, plain_moe.latent_attention, plain_moe.share_heads, plain.softcap,
)  # fmt: skip
_CONTRACT = Operators(
    "bitwise", linear, pack_to_keep, rms_norm, rope, gated, embedding, attention,
    write_kv, paged_attention, log_softmax, select_logprobs, linear_cross_entropy, adamw, square_sum,
    dequantize, route, dispatch, grouped_linear, grouped_gated, combine, balance_loss, write_latents, latent_attention,
    share_heads, softcap,
)  # fmt: skip
