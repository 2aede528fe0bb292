"""Chains in one pass: `csrc/fused.cpp`. What each one stands for is the table in `ops/fused.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.ops.raw.define import define, same
from lockstep.ops.raw.linear import panels


@define("gemm_gated(Tensor a, Tensor gate, Tensor up, int n, int activation, bool keep) -> (Tensor, Tensor, Tensor)")
def gemm_gated(
    a: Tensor, gate: Tensor, up: Tensor, n: int, activation: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """a [m, k], packed gate and up of n columns -> y [m, n], and with `keep` the two products (else [0, n])."""
    for name, packed in (("gate", gate), ("up", up)):
        same(name, tuple(packed.shape[:2]), (panels(n), a.shape[1]))
    kept = a.shape[0] if keep else 0
    return a.new_empty(a.shape[0], n), a.new_empty(kept, n), a.new_empty(kept, n)


@define("gemm_activation(Tensor a, Tensor packed, int n, Tensor? bias, int activation, bool keep) -> (Tensor, Tensor)")
def gemm_activation(
    a: Tensor, packed: Tensor, n: int, bias: Tensor | None, activation: int, keep: bool
) -> tuple[Tensor, Tensor]:
    """y [m, n], and with `keep` the activation's argument (else [0, n])."""
    same("packed", tuple(packed.shape[:2]), (panels(n), a.shape[1]))
    return a.new_empty(a.shape[0], n), a.new_empty(a.shape[0] if keep else 0, n)


@define(
    "gemm_three(Tensor a, Tensor packed0, Tensor packed1, Tensor packed2, int n0, int n1, int n2, Tensor? bias0, "
    "Tensor? bias1, Tensor? bias2) -> (Tensor, Tensor, Tensor)"
)
def gemm_three(
    a: Tensor, packed0: Tensor, packed1: Tensor, packed2: Tensor, n0: int, n1: int, n2: int, bias0: Tensor | None,
    bias1: Tensor | None, bias2: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """a [m, k] -> [m, n0], [m, n1], [m, n2]: `gemm` with each weight, in a's dtype."""
    for i, (packed, n) in enumerate(((packed0, n0), (packed1, n1), (packed2, n2))):
        same(f"packed{i}", tuple(packed.shape[:2]), (panels(n), a.shape[1]))
    return a.new_empty(a.shape[0], n0), a.new_empty(a.shape[0], n1), a.new_empty(a.shape[0], n2)


@define("gemm_add(Tensor x, Tensor a, Tensor packed) -> Tensor")
def gemm_add(x: Tensor, a: Tensor, packed: Tensor) -> Tensor:
    """x float32 [m, n] plus the product of a [m, k] with packed, rounded to a's dtype -> float32 [m, n]."""
    same("packed", tuple(packed.shape[:2]), (panels(x.shape[1]), a.shape[1]))
    same("x", (x.shape[0], x.dtype), (a.shape[0], torch.float32))
    return torch.empty_like(x)


@define(
    "norm_rope(Tensor x, Tensor weight, Tensor positions, Tensor table, float eps, float offset) -> (Tensor, Tensor)"
)
def norm_rope(
    x: Tensor, weight: Tensor, positions: Tensor, table: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """x [T, heads, d], weight [d] -> [T, heads, d], 1 / rms float32 [T * heads]."""
    same("weight", tuple(weight.shape), (x.shape[2],))
    return torch.empty_like(x), x.new_empty(x.shape[0] * x.shape[1], dtype=torch.float32)


@define(
    "rope_write_kv(Tensor k, Tensor v, Tensor rotary, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor table, "
    "Tensor starts, Tensor positions) -> ()"
)
def rope_write_kv(
    k: Tensor, v: Tensor, rotary: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, starts: Tensor,
    positions: Tensor,
) -> None:  # fmt: skip
    """`write_kv` of k turned by the rotary table [P, d / 2, 2]."""
    same("rotary", tuple(rotary.shape[1:]), (k.shape[2] // 2, 2))
    same("k_pages", tuple(k_pages.shape[1:3]), tuple(k.shape[1:]))
