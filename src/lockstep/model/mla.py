"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come from one latent.

Two forms of the same function, with different roundings; `ModelConfig.mla_form` names the one that all paths share
under the contract:

- expanded: keys and values of every head are made from a token's latent (normed) by `kv_b`, then attention as in other
  families. Pages keep the keys and values, as in other families.
- absorbed: `kv_b` is split by head; its key half is applied to the query and its value half to the result, so that
  attention goes over the latents themselves, which are key and value of all heads. Pages keep the latent and one
  rotated key, both rounded to the compute dtype.

Under `numerics: fast`, which promises no bits, pages always keep latents (`keeps_latents`, config/pages.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.model import ModelConfig
from lockstep.errors import LockstepError
from lockstep.model.linear import Linear, WeightCache
from lockstep.model.norm import Norm
from lockstep.ops import KVPages, LatentPages, Operators, Packed, Paged, Pages

_NORM_EPS = 1e-6
"""Of the norms over latents, whatever the configuration's is, as in DeepSeek's own code and `transformers`."""


class LatentAttention(nn.Module):
    """Causal attention over latents. H heads, query and key heads of nope + rope elements, value heads of v_dim."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        rank, nope, rope, v_dim = (
            config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        )  # fmt: skip
        assert rank is not None
        assert nope is not None
        assert rope is not None
        assert v_dim is not None
        self.heads, self.rank, self.nope, self.rope, self.v_dim = config.num_heads, rank, nope, rope, v_dim
        self.scale, self.interleaved = config.scale, config.rope_interleaved
        self.absorbed = config.mla_form == "absorbed"
        width, queries = config.hidden_size, config.num_heads * (nope + rope)
        low = config.q_lora_rank
        self.q = Linear(width, queries) if low is None else None
        self.q_a = None if low is None else Linear(width, low)
        self.q_norm = None if low is None else Norm(config, low, _NORM_EPS)
        self.q_b = None if low is None else Linear(low, queries)
        self.kv_a = Linear(width, rank + rope)
        self.kv_norm = Norm(config, rank, _NORM_EPS)
        self.kv_b = HeadLinear(rank, self.heads, nope, v_dim, self.absorbed)
        self.o = Linear(config.num_heads * v_dim, width)

    def forward(self, ops: Operators, x: Tensor, batch: Packed | Paged, rope: Tensor, pages: Pages | None) -> Tensor:
        """x [T, D] -> [T, D]. rope: the table. pages: those of this layer, with a Paged batch."""
        nope, turned = self._queries(ops, x).split([self.nope, self.rope], dim=-1)
        latent, key = self.kv_a(ops, x).split([self.rank, self.rope], dim=-1)
        latent = self.kv_norm(ops, latent.contiguous())
        turned, key = self._rotate(ops, turned, batch, rope), self._rotate(ops, key[:, None], batch, rope)[:, 0]
        absorbed = self.absorbed if isinstance(batch, Packed) else isinstance(pages, LatentPages)
        attend = self._absorbed if absorbed else self._expanded
        return self.o(ops, attend(ops, nope, turned, latent, key, batch, pages).reshape(x.shape[0], -1))

    def _queries(self, ops: Operators, x: Tensor) -> Tensor:
        """[T, H, nope + rope]."""
        if self.q_a is not None and self.q_norm is not None and self.q_b is not None:
            q = self.q_b(ops, self.q_norm(ops, self.q_a(ops, x)))
        else:
            assert self.q is not None
            q = self.q(ops, x)
        return q.view(x.shape[0], self.heads, self.nope + self.rope)

    def _rotate(self, ops: Operators, x: Tensor, batch: Packed | Paged, table: Tensor) -> Tensor:
        """x [T, *, rope] rotated, its pairs half the width apart afterwards: scores do not see their order."""
        if self.interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return ops.rope(x.contiguous(), batch.positions, table)

    def _expanded(
        self, ops: Operators, nope: Tensor, turned: Tensor, latent: Tensor, key: Tensor, batch: Packed | Paged,
        pages: Pages | None,
    ) -> Tensor:  # fmt: skip
        kv = self.kv_b(ops, latent).view(-1, self.heads, self.nope + self.v_dim)
        k = torch.cat([kv[..., : self.nope], ops.share_heads(key, self.heads)], -1)
        q, v = torch.cat([nope, turned], -1), kv[..., self.nope :]
        if isinstance(batch, Packed):
            return ops.attention(q, k, v, batch, self.scale)
        assert isinstance(pages, KVPages), "a Paged batch needs the pages of its cache"
        ops.write_kv(k, v, pages, batch)
        return ops.paged_attention(q, pages, batch, self.scale)

    def _absorbed(
        self, ops: Operators, nope: Tensor, turned: Tensor, latent: Tensor, key: Tensor, batch: Packed | Paged,
        pages: Pages | None,
    ) -> Tensor:  # fmt: skip
        to_latent, to_value = self.kv_b.halves(ops, nope.dtype)
        q, kept = torch.cat([self._each_head(ops, nope, to_latent), turned], -1), torch.cat([latent, key], -1)
        if isinstance(batch, Packed):
            y = ops.attention(q, kept[:, None], latent[:, None], batch, self.scale)
        else:
            assert isinstance(pages, LatentPages), "a Paged batch needs the pages of its cache"
            ops.write_latents(kept, pages, batch)
            y = ops.latent_attention(q, pages, batch, self.scale, self.rank)
        return self._each_head(ops, y, to_value)

    def _each_head(self, ops: Operators, x: Tensor, weights: Any) -> Tensor:
        """x [T, H, K] times each head's own weight [N, K] transposed -> [T, H, N]: a product grouped by head."""
        count = x.shape[0]
        offsets = torch.arange(0, (self.heads + 1) * count, count, dtype=torch.int32, device=x.device)
        y = ops.grouped_linear(x.transpose(0, 1).reshape(self.heads * count, -1), weights, offsets)
        return y.view(self.heads, count, -1).transpose(0, 1)


class HeadLinear(Linear):
    """From latents to keys (without positions) and values of every head: as one product, or head by head."""

    def __init__(self, rank: int, heads: int, nope: int, v_dim: int, absorbed: bool):
        """absorbed: under the contract it is read head by head alone."""
        super().__init__(rank, heads * (nope + v_dim))
        self.heads, self.nope, self.absorbed = heads, nope, absorbed
        self.by_head = WeightCache(self._pack_by_head)

    def prepare(self, ops: Operators, dtype: torch.dtype) -> None:
        """Pack the weight as it is read: pages of `numerics: fast` always keep latents, its whole sequences do not."""
        if not self.absorbed:
            super().prepare(ops, dtype)
        if self.absorbed or ops.numerics == "fast":
            self.by_head.fill(self.weight, ops, dtype)

    def halves(self, ops: Operators, dtype: torch.dtype) -> Any:
        """By head: from a query without positions to the latent [rank, nope], and from there to the value [v, rank]."""
        if self.lora is not None:
            raise LockstepError(
                "this model carries an adapter on kv_b_proj, which the absorbed form of latent attention does not "
                "read: merge it (lockstep export), or take the expanded form (mla_form: expanded, numerics: bitwise)"
            )
        found = self.by_head.get(self.weight, ops, dtype)
        return self._split(found) if isinstance(found, Tensor) else found

    def _split(self, weight: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        by_head = weight.unflatten(0, (self.heads, -1))
        return [w.t() for w in by_head[:, : self.nope]], list(by_head[:, self.nope :])

    def _pack_by_head(self, ops: Operators, weight: Tensor, dtype: torch.dtype) -> list[list[Any]]:
        return [[ops.pack(w.contiguous(), dtype) for w in side] for side in self._split(weight)]
