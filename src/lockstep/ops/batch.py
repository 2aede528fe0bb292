"""How the rows of a product belong to sequences: the two shapes a batch has.

A batch is always *packed*: the tokens of all its sequences stand back to back in one dimension ``T``,
without padding. ``Packed`` holds whole sequences (training, scoring); ``Paged`` holds the new tokens of
sequences whose earlier keys and values lie in pages (prefill chunks, decode).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lockstep.config.pages import PAGE
from lockstep.errors import LockstepError


@dataclass(frozen=True)
class Packed:
    """Whole sequences back to back; row ``r`` of sequence ``s`` has position ``r - starts[s]``.

    positions: int32 [T]. starts: int32 [S + 1], rising from 0 to T.
    """

    positions: Tensor
    starts: Tensor

    @property
    def position_bound(self) -> int:
        """No position reaches this: known from shapes, without a look at the numbers."""
        return self.positions.shape[0]

    @staticmethod
    def of(lengths: Sequence[int]) -> Packed:
        """The batch of sequences of these lengths. LockstepError unless there is one, and each has a token."""
        try:
            whole = [operator.index(n) for n in lengths]
        except TypeError:
            whole = []
        if not whole or min(whole) < 1:
            raise LockstepError(
                f"lengths are {lengths}: expected whole numbers; a sequence has at least one token, and a batch one "
                "sequence."
            )
        starts = torch.zeros(len(whole) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(whole, dtype=torch.int32).cumsum(0)
        positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in whole])
        return Packed(positions, starts)


@dataclass(frozen=True)
class Paged:
    """New tokens of sequences whose keys and values lie in pages, theirs included once written.

    positions: int32 [T], consecutive within a sequence. starts: int32 [S + 1].
    page_table: int32 [S, P]; entry ``[s, j]`` is the page that holds positions ``64 j .. 64 j + 63`` of s.
    Sequence ``s`` attends to positions ``0 .. positions[starts[s + 1] - 1]``.
    """

    positions: Tensor
    starts: Tensor
    page_table: Tensor

    @property
    def position_bound(self) -> int:
        """No position reaches this: known from shapes, without a look at the numbers."""
        return self.page_table.shape[1] * PAGE


@dataclass(frozen=True)
class KVPages:
    """The pages of one layer. k: [pages, kv_heads, head_dim, PAGE] (transposed, so that a decode step reads
    it in order); v: [pages, kv_heads, PAGE, v_dim]. Both bfloat16 or float32."""

    k: Tensor
    v: Tensor

    @staticmethod
    def zeros(pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype, v_dim: int | None = None) -> KVPages:
        """v_dim: width of a value head, by default that of a key head."""
        k = torch.zeros(pages, kv_heads, head_dim, PAGE, dtype=dtype)
        v = torch.zeros(pages, kv_heads, PAGE, v_dim or head_dim, dtype=dtype)
        return KVPages(k, v)


@dataclass(frozen=True)
class LatentPages:
    """The pages of one layer of latent attention. rows: [pages, PAGE, width], bfloat16 or float32; a row is a token's
    latent and then its rotated key, which all heads share."""

    rows: Tensor

    @staticmethod
    def zeros(pages: int, width: int, dtype: torch.dtype) -> LatentPages:
        return LatentPages(torch.zeros(pages, PAGE, width, dtype=dtype))


@dataclass(frozen=True)
class Int8Pages:
    """The pages of one layer in eight bits, for `numerics: fast`. k, v: int8 in the layout of KVPages; k_scale and
    v_scale: float32 [pages, kv_heads, PAGE], of each token's head."""

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor

    @staticmethod
    def zeros(pages: int, kv_heads: int, head_dim: int, v_dim: int | None = None) -> Int8Pages:
        """v_dim: width of a value head, by default that of a key head."""
        kept = KVPages.zeros(pages, kv_heads, head_dim, torch.int8, v_dim)
        return Int8Pages(kept.k, kept.v, *(torch.zeros(pages, kv_heads, PAGE) for _ in range(2)))


Pages = KVPages | LatentPages | Int8Pages


@dataclass(frozen=True)
class Routing:
    """How a token chooses experts.

    scoring: softmax over all logits, or the sigmoid of each. normalize: a token's weights are divided by their sum.
    groups, top_groups: experts lie in equal groups, of which only the best are chosen from. pairs: a group is as good
    as its two best experts together (DeepSeek-V3), else as its best one (V2). scale: factor on all weights.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    groups: int = 1
    top_groups: int = 1
    pairs: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid"):
            raise LockstepError(f"scoring is {self.scoring!r}: give softmax or sigmoid.")


@dataclass(frozen=True)
class Routes:
    """Where T tokens go among E experts. Grouped order: by expert, then by token.

    weights: float32 [T, k]; chosen: int32 [T, k], the experts of each token, ascending.
    offsets: int32 [E + 1], where an expert's rows begin. rows: int32 [T k], the token of each row.
    slots: int32 [T, k], the row of each choice.
    """

    weights: Tensor
    chosen: Tensor
    offsets: Tensor
    rows: Tensor
    slots: Tensor

    @property
    def groups(self) -> Tensor:
        """int32 [G + 1]: where the rows begin that go through one expert together, in what `dispatch` gives."""
        return self.offsets
