"""Attention over pages of latents: `csrc/latent.cpp`."""

from __future__ import annotations

from torch import Tensor

from lockstep.ops.raw.define import define, same


@define("write_latents(Tensor latents, Tensor(a!) pages, Tensor table, Tensor starts, Tensor positions) -> ()")
def write_latents(latents: Tensor, pages: Tensor, table: Tensor, starts: Tensor, positions: Tensor) -> None:
    """latents [T, L] into pages [*, 64, L]."""
    same("pages", pages.shape[2], latents.shape[1])


@define(
    "attention_latent(Tensor q, Tensor pages, Tensor table, Tensor starts, Tensor positions, int v_dim, float scale) "
    "-> Tensor"
)
def attention_latent(
    q: Tensor, pages: Tensor, table: Tensor, starts: Tensor, positions: Tensor, v_dim: int, scale: float
) -> Tensor:
    """q [T, heads, L] -> [T, heads, v_dim]."""
    same("pages", pages.shape[2], q.shape[2])
    return q.new_empty(q.shape[0], q.shape[1], v_dim)
