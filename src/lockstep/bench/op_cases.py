"""What the operator bench runs: the operators of a decoder on the shapes of SmolLM2-135M, PyTorch's own beside each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.bench.op_case import ORDER, PACKS, PYTHON, QUICK, Case, Run, Sizes
from lockstep.bench.op_chains import chains, routing
from lockstep.ops import (
    PAGE,
    AdamWFactors,
    Int8Pages,
    KVPages,
    LatentPages,
    Operators,
    Packed,
    Paged,
    int8_pages,
    plain,
)
from lockstep.ops.gated import activation
from lockstep.ops.norm import layer_norm


def cases(s: Sizes) -> list[Case]:
    """All cases: operators by themselves, products first; then chains in one pass, and what routes tokens."""
    of_one = [*_products(s), *_experts(s), *_attention(s), *_rows(s), *_vocabulary(s), *_optimizer(s)]
    return [*of_one, *chains(s), *routing(s)]


def _products(s: Sizes) -> list[Case]:
    def train(k: int, n: int) -> Case:
        name = f"linear {s.tokens} x {k} -> {n}"
        run = lambda o, x, w: o.linear(x, w)  # noqa: E731
        return Case(name, ((s.tokens, k), (n, k)), run, F.linear, 2.0 * s.tokens * k * n, why=PACKS)

    def infer(rows: int) -> Case:
        def pack(ops: Operators, inputs: Sequence[Tensor]) -> Sequence[object]:
            return inputs[0], ops.pack(inputs[1], inputs[0].dtype)

        name, shapes = f"linear {rows} x {s.width} -> {s.ffn}, packed", ((rows, s.width), (s.ffn, s.width))
        flops = None if rows == 1 else 2.0 * rows * s.width * s.ffn
        return Case(name, shapes, lambda o, x, w: o.linear(x, w), F.linear, flops, gradient=False, prepare=pack)

    shapes = ((s.width, s.width), (s.width, s.ffn), (s.ffn, s.width))
    return [*(train(k, n) for k, n in shapes), *(infer(rows) for rows in (1, 8, 16, 64))]


def _experts(s: Sizes) -> list[Case]:
    """Rows of eight experts, unequally many: PyTorch's side is a product for each."""
    experts = 8
    offsets = torch.tensor([s.tokens * e * (e + 1) // (experts * (experts + 1)) for e in range(experts + 1)])
    offsets = offsets.to(torch.int32)
    ends = offsets.tolist()

    def theirs(x: Tensor, *weights: Tensor) -> Tensor:
        parts = zip(weights, pairwise(ends), strict=True)
        return torch.cat([F.linear(x[a:b], weight) for weight, (a, b) in parts])

    def their_gate_and_up(x: Tensor, *weights: Tensor) -> Tensor:
        parts = zip(weights[:experts], weights[experts:], pairwise(ends), strict=True)
        return torch.cat([F.silu(F.linear(x[a:b], gate)) * F.linear(x[a:b], up) for gate, up, (a, b) in parts])

    return [
        Case(
            f"gate, up + SwiGLU {s.tokens} x {s.width} -> {s.ffn // 4}, {experts} experts",
            ((s.tokens, s.width), *[(s.ffn // 4, s.width)] * (2 * experts)),
            lambda o, x, *weights: o.grouped_gated(x, weights[:experts], weights[experts:], offsets, "silu"),
            their_gate_and_up, 4.0 * s.tokens * s.width * (s.ffn // 4), why=PACKS,
        ),
        Case(
            f"grouped product {s.tokens} x {s.width} -> {s.ffn // 4}, {experts} experts",
            ((s.tokens, s.width), *[(s.ffn // 4, s.width)] * experts),
            lambda o, x, *weights: o.grouped_linear(x, weights, offsets), theirs,
            2.0 * s.tokens * s.width * (s.ffn // 4), why=PACKS,
        )
    ]  # fmt: skip


def _attention(s: Sizes) -> list[Case]:
    batch = Packed.of([s.length] * (s.tokens // s.length))
    qkv = ((s.tokens, s.heads, s.dim), *[(s.tokens, s.kv_heads, s.dim)] * 2)
    window, scale = s.length // 4, s.dim**-0.5
    pairs = s.tokens * (s.length + 1) / 2  # causal (query, key) pairs of a head
    in_window = s.tokens * (window - window * (window - 1) / 2 / s.length)
    at = torch.arange(s.length)
    mask = (at[:, None] >= at) & (at[:, None] - at < window)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, **how: object) -> Tensor:
        q, k, v = (x.view(-1, s.length, x.shape[1], s.dim).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how).transpose(1, 2)  # type: ignore[arg-type]

    return [
        Case(
            "attention", qkv, lambda o, *x: o.attention(*x, batch, scale),
            lambda *x: sdpa(*x, is_causal=True), 4.0 * pairs * s.heads * s.dim,
        ),
        Case(
            f"attention, window {window}", qkv, lambda o, *x: o.attention(*x, batch, scale, window),
            lambda *x: sdpa(*x, attn_mask=mask), 4.0 * in_window * s.heads * s.dim,
        ),
        Case(
            "attention, soft cap 50", qkv, lambda o, *x: o.attention(*x, batch, scale, None, 50.0),
            lambda q, k, v: plain.attention(q, k, v, batch, scale, None, 50.0), 4.0 * pairs * s.heads * s.dim,
        ),
        _expanded(s, batch, pairs),
        _decode(s, scale),
        _int8_decode(s, scale),
        _latent_decode(s),
    ]  # fmt: skip


def _expanded(s: Sizes, batch: Packed, pairs: float) -> Case:
    """Latent attention in its expanded form: as many key heads as query heads, keys wider than values."""
    heads, dim, v_dim = 4, 3 * s.dim, 2 * s.dim
    scale = dim**-0.5

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(-1, s.length, heads, x.shape[2]).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)

    return Case(
        f"latent attention, expanded, {heads} heads", (*[(s.tokens, heads, dim)] * 2, (s.tokens, heads, v_dim)),
        lambda o, *x: o.attention(*x, batch, scale), theirs, 2.0 * pairs * heads * (dim + v_dim),
    )  # fmt: skip


def _decode(s: Sizes, scale: float) -> Case:
    """One new token of each of four sequences over its pages; PyTorch's side reads keys and values that are whole."""
    count, keys = 4, s.length
    pages = keys // PAGE

    def into_pages(ops: Operators, inputs: Sequence[Tensor]) -> Sequence[object]:
        q, k, v = inputs
        k = k.view(count, s.kv_heads, pages, PAGE, s.dim).permute(0, 2, 1, 4, 3).flatten(0, 1).contiguous()
        v = v.view(count, s.kv_heads, pages, PAGE, s.dim).transpose(1, 2).flatten(0, 1).contiguous()
        return q, KVPages(k, v)

    batch = _last_tokens(count, keys)
    return Case(
        f"paged attention, 1 query x {keys} keys", _last_token_shapes(s, count, keys),
        lambda o, q, kept: o.paged_attention(q, kept, batch, scale), _to_whole(scale), gradient=False,
        prepare=into_pages,
    )  # fmt: skip


def _int8_decode(s: Sizes, scale: float) -> Case:
    """The same over pages in eight bits (`numerics: fast`) and a long context."""
    count, keys = 4, 8 * s.length
    batch, elements = _last_tokens(count, keys), 2 * count * s.kv_heads * keys * s.dim
    starts = torch.arange(0, count * keys + 1, keys, dtype=torch.int32)
    whole = Paged(torch.arange(keys, dtype=torch.int32).repeat(count), starts, batch.page_table)

    def into_pages(ops: Operators, inputs: Sequence[Tensor]) -> Sequence[object]:
        q, k, v = inputs
        pages = Int8Pages.zeros(count * keys // PAGE, s.kv_heads, s.dim)
        int8_pages.write_kv(k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1), pages, whole)
        return q, pages

    return Case(
        f"paged attention, 1 query x {keys} keys in eight bits", _last_token_shapes(s, count, keys),
        lambda o, q, kept: int8_pages.paged_attention(q, kept, batch, scale, 0, 0.0), _to_whole(scale),
        gradient=False, prepare=into_pages, moved=(elements // 2 + 2 * elements // s.dim, 0),
    )  # fmt: skip


def _last_tokens(count: int, keys: int) -> Paged:
    """The last of `keys` tokens of each of `count` sequences."""
    table = torch.arange(count * keys // PAGE, dtype=torch.int32).view(count, -1)
    return Paged(torch.full((count,), keys - 1, dtype=torch.int32), torch.arange(count + 1, dtype=torch.int32), table)


def _last_token_shapes(s: Sizes, count: int, keys: int) -> tuple[tuple[int, ...], ...]:
    return (count, s.heads, s.dim), *[(count, s.kv_heads, keys, s.dim)] * 2


def _to_whole(scale: float) -> Run:
    return lambda q, k, v: F.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale, enable_gqa=True)[:, :, 0]


def _latent_decode(s: Sizes) -> Case:
    """One new token of one sequence over its latents, absorbed; DeepSeek-V3's widths, a quarter of its heads."""
    heads, rank, rope = (32, 512, 64) if s is not QUICK else (4, 32, 16)
    keys, width, scale = s.length, rank + rope, rank**-0.5
    table = torch.arange(keys // PAGE, dtype=torch.int32)[None]
    batch = Paged(torch.tensor([keys - 1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), table)

    def into_pages(ops: Operators, inputs: Sequence[Tensor]) -> Sequence[object]:
        return inputs[0], LatentPages(inputs[1].view(-1, PAGE, width))

    def theirs(q: Tensor, latents: Tensor) -> Tensor:
        k = latents[None, None]
        return F.scaled_dot_product_attention(q[:, :, None], k, k[..., :rank], scale=scale, enable_gqa=True)[:, :, 0]

    return Case(
        f"latent attention, 1 query x {keys} latents, {heads} heads", ((1, heads, width), (keys, width)),
        lambda o, q, kept: o.latent_attention(q, kept, batch, scale, rank), theirs,
        2.0 * heads * keys * (width + rank), gradient=False, prepare=into_pages,
    )  # fmt: skip


def _rows(s: Sizes) -> list[Case]:
    batch = Packed.of([s.length] * (s.tokens // s.length))
    table = torch.rand(s.length, s.dim // 2, 2)
    wide, ffn = (s.tokens, s.width), (s.tokens, s.ffn)
    return [
        Case(
            "RMS norm", (wide, (s.width,)), lambda o, x, w: o.rms_norm(x, w, 1e-5),
            lambda x, w: F.rms_norm(x, (s.width,), w, 1e-5),
        ),
        Case(
            "layer norm", (wide, (s.width,), (s.width,)), lambda o, x, w, b: layer_norm(x, w, b, 1e-5),
            lambda x, w, b: F.layer_norm(x, (s.width,), w, b), why=PYTHON,
        ),
        Case(
            "rotary", ((s.tokens, s.heads, s.dim),), lambda o, x: o.rope(x, batch.positions, table),
            lambda x: plain.rope(x, batch.positions, table),
        ),
        Case("SiLU", (ffn,), lambda o, x: activation(x, "silu"), F.silu, why=PYTHON),
        Case("SwiGLU", (ffn, ffn), lambda o, g, u: o.gated(g, u, "silu"), lambda g, u: F.silu(g) * u),
        Case(
            "GeGLU", (ffn, ffn), lambda o, g, u: o.gated(g, u, "gelu_tanh"),
            lambda g, u: F.gelu(g, approximate="tanh") * u,
        ),
    ]  # fmt: skip


def _vocabulary(s: Sizes) -> list[Case]:
    rows = s.tokens // 4
    targets = torch.arange(rows) * 97 % s.vocabulary
    weights = torch.full((rows,), 1 / rows)
    ids = torch.arange(s.tokens) * 97 % s.vocabulary
    logits = ((rows, s.vocabulary),)
    return [
        Case(
            "embedding", ((s.vocabulary, s.width),), lambda o, w: o.embedding(ids, w, w.dtype),
            lambda w: F.embedding(ids, w),
            why=f"{PYTHON}; the gradient adds in float32",
            moved=(2 * s.tokens * s.width, (s.tokens + s.vocabulary) * s.width),
        ),
        Case(
            "linear + cross-entropy", ((rows, s.width), (s.vocabulary, s.width)),
            lambda o, x, w: o.linear_cross_entropy(x, w, targets, weights)[0],
            lambda x, w: F.cross_entropy((x @ w.T).float(), targets), 2.0 * rows * s.width * s.vocabulary,
            whole=True,  # both gradients are computed in the forward
            why="three quarters of it are its three products, at linear's rate; the rest is copies of their left-hand "
            "sides (7 %), the passes over the logits (5 %), and weight and hidden laid out",
        ),
        Case(
            "log-probability of a token", logits, lambda o, x: o.select_logprobs(x, targets),
            lambda x: F.log_softmax(x, -1).gather(1, targets[:, None])[:, 0], gradient=False, wide=1, why=ORDER,
        ),
        Case(
            "soft cap", logits, lambda o, x: o.softcap(x, 30.0), lambda x: 30.0 * torch.tanh(x / 30.0), gradient=False,
            wide=1,
        ),
        Case(
            "log-softmax", logits, lambda o, x: o.log_softmax(x), lambda x: F.log_softmax(x, -1),
            gradient=False, wide=1, why=ORDER,
        ),
    ]  # fmt: skip


def _optimizer(s: Sizes) -> list[Case]:
    count = s.width * s.ffn
    factors = AdamWFactors(1.0, 0.9, 0.1, 0.95, 0.05, 1.0, 1e-8, 1.0, 1e-4)
    moments = [torch.zeros(count), torch.zeros(count)]
    kept: dict[int, torch.optim.AdamW] = {}

    def fused(p: Tensor, g: Tensor) -> None:
        if id(p) not in kept:
            kept[id(p)] = torch.optim.AdamW([p], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        p.grad = g
        kept[id(p)].step()
        p.grad = None

    def ours(ops: Operators, p: Tensor, g: Tensor) -> None:
        ops.adamw(p, g, *moments, factors)

    return [
        Case("AdamW", ((count,), (count,)), ours, fused, gradient=False, wide=2),
        Case(
            "sum of squares", ((count,),), lambda o, x: o.square_sum(x), torch.linalg.vector_norm, gradient=False,
            wide=1, why="it adds in float64 by a fixed tree",
        ),
    ]  # fmt: skip
