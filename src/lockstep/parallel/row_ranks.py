"""The rows of a micro-batch's activations, shared out among the ranks of an axis: sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.ops.row_share import row_shares
from lockstep.parallel.collectives import Axis


class RankRows:
    """`lockstep.ops.row_shards.Rows` over an axis: a rank has a run of nearly equal length, the first the longer ones.

    A share does not tell how many rows there are in all, so whoever goes through micro-batches of different lengths
    says with `begin` which one comes, before its forward and before its backward. step: rows that stay together.
    """

    def __init__(self, axis: Axis, step: int = 1) -> None:
        self.axis, self.step = axis, step
        self._shares: list[int] = []

    def begin(self, count: int) -> None:
        """What comes now is about a micro-batch of so many rows."""
        self._shares = row_shares(count, self.axis.size, self.step)

    def share(self, count: int) -> int:
        """Of so many rows, how many are this rank's."""
        return row_shares(count, self.axis.size, self.step)[self.axis.index]

    def own(self, whole: Tensor) -> Tensor:
        return whole.split(self._shares)[self.axis.index]

    def gather(self, own: Tensor) -> Tensor:
        members = range(self.axis.size)
        found = [own if i == self.axis.index else own.new_empty(n, *own.shape[1:]) for i, n in enumerate(self._shares)]
        self.axis.exchange([own for _ in members], found)
        return torch.cat(found)

    def to_heads(self, own: Tensor) -> Tensor:
        heads = own.tensor_split(self.axis.size, dim=1)
        found = [own.new_empty(n, *heads[0].shape[1:]) for n in self._shares]
        found[self.axis.index] = heads[self.axis.index]
        self.axis.exchange(heads, found)
        return torch.cat(found)

    def to_rows(self, heads: Tensor) -> Tensor:
        rows = heads.split(self._shares)
        mine = rows[self.axis.index]
        found = [mine if i == self.axis.index else torch.empty_like(mine) for i in range(self.axis.size)]
        self.axis.exchange(rows, found)
        return torch.cat(found, dim=1)

    def add(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        return self.axis.add_part(part.split(self._shares), dtype)

    def total(self, part: Tensor) -> Tensor:
        return self.axis.add(part)

    def hand_on(self, go_on: Callable[[Tensor | None], Tensor], shape: Sequence[int]) -> Tensor:
        return self.axis.hand_on(go_on, shape)
