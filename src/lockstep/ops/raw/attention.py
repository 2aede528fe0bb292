"""Causal attention and the KV pages: `csrc/attention.cpp`, `csrc/attention_int8.cpp`, `csrc/attention_backward.cpp`.

window 0: none. softcap 0: none, else scores become softcap * tanh(score / softcap).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.ops.raw.define import define, same


@define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor table, Tensor starts, "
    "Tensor positions) -> ()"
)
def write_kv(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, starts: Tensor, positions: Tensor
) -> None:
    """k [T, kv heads, d], v [T, kv heads, e] into pages [*, kv heads, d, 64] and [*, kv heads, 64, e]."""
    same("k_pages", tuple(k_pages.shape[1:3]), tuple(k.shape[1:]))
    same("v_pages", (v_pages.shape[1], v_pages.shape[3]), tuple(v.shape[1:]))


@define(
    "attention_paged(Tensor q, Tensor k_pages, Tensor v_pages, Tensor table, Tensor starts, Tensor positions, "
    "float scale, int window, float softcap) -> Tensor"
)
def attention_paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, starts: Tensor, positions: Tensor, scale: float,
    window: int, softcap: float,
) -> Tensor:  # fmt: skip
    """q [T, heads, d] -> [T, heads, e]."""
    return _result(q, k_pages, v_pages)


@define(
    "write_kv_int8(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor(c!) k_scale, Tensor(d!) v_scale, "
    "Tensor table, Tensor starts, Tensor positions) -> ()"
)
def write_kv_int8(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, k_scale: Tensor, v_scale: Tensor, table: Tensor,
    starts: Tensor, positions: Tensor,
) -> None:  # fmt: skip
    """As write_kv, into pages int8 with scales float32 [*, kv heads, 64]."""
    write_kv(k, v, k_pages, v_pages, table, starts, positions)


@define(
    "attention_paged_int8(Tensor q, Tensor k_pages, Tensor v_pages, Tensor k_scale, Tensor v_scale, Tensor table, "
    "Tensor starts, Tensor positions, float scale, int window, float softcap) -> Tensor"
)
def attention_paged_int8(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, k_scale: Tensor, v_scale: Tensor, table: Tensor, starts: Tensor,
    positions: Tensor, scale: float, window: int, softcap: float,
) -> Tensor:  # fmt: skip
    """As attention_paged, over pages that write_kv_int8 fills."""
    return _result(q, k_pages, v_pages)


def _result(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
    same("k_pages' head_dim", k_pages.shape[2], q.shape[2])
    return q.new_empty(q.shape[0], q.shape[1], v_pages.shape[3])


@define(
    "attention_packed(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor positions, float scale, int window, "
    "float softcap) -> (Tensor, Tensor)"
)
def attention_packed(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, positions: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """q [T, heads, d], k [T, kv heads, d], v [T, kv heads, e] -> output [T, heads, e], log-sum-exp to base 2 float32
    [T, heads]."""
    same("v", tuple(v.shape[:2]), tuple(k.shape[:2]))
    same("k", (k.shape[0], k.shape[2]), (q.shape[0], q.shape[2]))
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


@define(
    "attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor starts, "
    "Tensor positions, float scale, int window, float softcap) -> (Tensor, Tensor, Tensor)"
)
def attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor, positions: Tensor,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv."""
    same("d_out", tuple(d_out.shape), tuple(out.shape))
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
