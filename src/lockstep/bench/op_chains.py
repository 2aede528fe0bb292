"""Cases of the operator bench: chains in one pass, and what routes tokens to experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.bench.op_case import PACKS, PYTHON, Case, Sizes
from lockstep.ops import PAGE, KVPages, Operators, Packed, Paged, Routing, fused, plain, plain_moe


def chains(s: Sizes) -> list[Case]:
    """What a compiler's passes make of two operators or three; PyTorch's side is the chain."""
    batch = Packed.of([s.length] * (s.tokens // s.length))
    table = torch.rand(s.length, s.dim // 2, 2)
    rows, up, heads = (s.tokens, s.width), (s.ffn, s.width), (s.tokens, s.heads, s.dim)
    flops = 2.0 * s.tokens * s.width * s.ffn
    return [
        Case(
            f"gate, up + SwiGLU {s.tokens} x {s.width} -> {s.ffn}", (rows, up, up),
            lambda o, x, g, u: fused.linear_gated(x, g, u, "silu"),
            lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), 2 * flops, why=PACKS,
        ),
        Case(
            f"linear + GELU {s.tokens} x {s.width} -> {s.ffn}", (rows, up),
            lambda o, x, w: fused.linear_activation(x, w, None, "gelu_tanh"),
            lambda x, w: F.gelu(F.linear(x, w), approximate="tanh"), flops, why=PACKS,
        ),
        Case(
            "residual + RMS norm", (rows, rows, (s.width,)), lambda o, x, h, w: fused.add_rms_norm(x, h, w, 1e-5),
            lambda x, h, w: _residual(x, h, lambda y: F.rms_norm(y, (s.width,), w.float(), 1e-5)), wide=1,
        ),
        Case(
            "residual + layer norm", (rows, rows, (s.width,), (s.width,)),
            lambda o, x, h, w, b: fused.add_layer_norm(x, h, w, b, 1e-5),
            lambda x, h, w, b: _residual(x, h, lambda y: F.layer_norm(y, (s.width,), w.float(), b.float())), wide=1,
            why=PYTHON,
        ),
        Case(
            "RMS norm of heads + rotary", (heads, (s.dim,)),
            lambda o, x, w: fused.norm_rope(x, w, batch.positions, table, 1e-5),
            lambda x, w: plain.rope(F.rms_norm(x, (s.dim,), w, 1e-5), batch.positions, table),
        ),
        _turned_into_pages(s, batch, table),
    ]  # fmt: skip


def _residual(x: Tensor, h: Tensor, norm: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    total = x + h
    return total, norm(total).to(h.dtype)


def _turned_into_pages(s: Sizes, batch: Packed, table: Tensor) -> Case:
    """Rotary + KV write of whole sequences, into pages on both sides."""
    count, per = s.tokens // s.length, s.length // PAGE
    pages = torch.arange(count * per, dtype=torch.int32).view(count, per)
    paged, new = Paged(batch.positions, batch.starts, pages), (s.tokens, s.kv_heads, s.dim)

    def into(ops: Operators, inputs: Sequence[Tensor]) -> Sequence[object]:
        return *inputs, KVPages.zeros(count * per, s.kv_heads, s.dim, inputs[0].dtype)

    def ours(ops: Operators, k: Tensor, v: Tensor, kept: KVPages) -> tuple[Tensor, Tensor]:
        fused.rope_write_kv(k, v, table, kept, paged)
        return kept.k, kept.v

    def theirs(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.view(-1, PAGE, s.kv_heads, s.dim) for x in (plain.rope(k, batch.positions, table), v))
        return k.permute(0, 2, 3, 1).contiguous(), v.transpose(1, 2).contiguous()

    moved = 4 * s.tokens * s.kv_heads * s.dim
    return Case("rotary + KV write", (new, new), ours, theirs, gradient=False, prepare=into, moved=(moved, 0))


def routing(s: Sizes) -> list[Case]:
    """Choosing of 64 experts, and rows to them and back. PyTorch's side is `numerics: fast`."""
    experts, x = 64, (s.tokens, s.width)
    softmax, sigmoid = Routing(8), Routing(8, "sigmoid", groups=8, top_groups=4, scale=2.5)
    bias = torch.linspace(-1, 1, experts)
    logits = torch.randn(s.tokens, experts, generator=torch.Generator().manual_seed(1))
    routes = plain_moe.route(logits, softmax)
    return [
        Case(
            f"router, 8 of {experts}", ((s.tokens, experts),), lambda o, y: o.route(y, softmax).weights,
            lambda y: plain_moe.route(y, softmax).weights, wide=1,
        ),
        Case(
            f"router, 8 of {experts} in groups", ((s.tokens, experts),), lambda o, y: o.route(y, sigmoid, bias).weights,
            lambda y: plain_moe.route(y, sigmoid, bias).weights, wide=1,
        ),
        Case(
            f"dispatch and combine, 8 of {experts}", (x,), lambda o, y: o.combine(o.dispatch(y, routes), routes),
            lambda y: plain_moe.combine(plain_moe.dispatch(y, routes), routes),
            moved=(18 * s.tokens * s.width, 18 * s.tokens * s.width),
        ),
        Case(
            "load-balance loss", ((s.tokens, experts),), lambda o, y: o.balance_loss([y], [routes.offsets]),
            lambda y: plain_moe.balance_loss([y], [routes.offsets]), wide=1, why=PYTHON,
        ),
        Case(
            "copies for heads", ((s.tokens, s.dim),), lambda o, y: o.share_heads(y, s.heads),
            lambda y: plain_moe.share_heads(y, s.heads).contiguous(),
            moved=(10 * s.tokens * s.dim, 10 * s.tokens * s.dim), why=PYTHON,
        ),
    ]  # fmt: skip
