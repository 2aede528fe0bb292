"""What the first rank tells the others to join in, over the mesh itself: a header of five numbers, then the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lockstep.ops import Paged
from lockstep.parallel.collectives import Axis
from lockstep.parallel.transport import Pending

_PASS, _WEIGHTS = 0, 1
Pass = tuple[Tensor, Paged, Tensor]
"""tokens int64 [T], the batch, and the rows int64 [R] whose logits are wanted"""
Take = Callable[[int, str], Tensor]
"""(rank, name) -> that rank's slice of the parameter"""


class Lead:
    """The first rank's side. What is sent is kept until it has left."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._leaving: list[tuple[Pending, Tensor]] = []

    def tell_pass(self, tokens: Tensor, batch: Paged, rows: Tensor) -> None:
        """A forward pass, and the rows of it whose logits are wanted: everybody takes part in it next."""
        self._wait()
        table = batch.page_table
        header = torch.tensor([_PASS, len(tokens), len(batch.starts), table.shape[1], len(rows)])
        parts = [tokens, batch.positions, batch.starts, table.reshape(-1), rows]
        body = torch.cat([part.to(torch.int32) for part in parts])
        for rank in range(1, self._axis.size):
            self._send(header, rank)
            self._send(body, rank)

    def tell_weights(self, own: Mapping[str, Tensor], take: Take) -> None:
        """New weights: of every parameter of `own` (the first rank's) each rank gets its slice, in its dtype."""
        self._wait()
        for rank in range(1, self._axis.size):
            self._send(torch.tensor([_WEIGHTS, 0, 0, 0, 0]), rank)
        for name, kept in own.items():
            for rank in range(1, self._axis.size):
                self._send(take(rank, name).detach().to(kept.dtype).contiguous(), rank)
            self._wait()

    def _send(self, tensor: Tensor, rank: int) -> None:
        if tensor.numel():
            self._leaving.append((self._axis.send(tensor, rank), tensor))

    def _wait(self) -> None:
        for pending, _ in self._leaving:
            pending.wait()
        self._leaving.clear()


def follow(axis: Axis) -> Pass | None:
    """The next order to another rank: a pass to take part in, or None: new weights come (`receive_weights`)."""
    kind, tokens, starts, width, rows = _received(axis, torch.empty(5, dtype=torch.int64)).tolist()
    if kind == _WEIGHTS:
        return None
    sizes = [tokens, tokens, starts, (starts - 1) * width, rows]
    ids, positions, begins, table, chosen = _received(axis, torch.empty(sum(sizes), dtype=torch.int32)).split(sizes)
    return ids.long(), Paged(positions, begins, table.view(starts - 1, width)), chosen.long()


def receive_weights(axis: Axis, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The slices that `tell_weights` sends, of the names, shapes and dtypes of this rank's parameters."""
    return {name: _received(axis, torch.empty(kept.shape, dtype=kept.dtype)) for name, kept in own.items()}


def _received(axis: Axis, out: Tensor) -> Tensor:
    if out.numel():
        axis.receive(out, 0).wait()
    return out
