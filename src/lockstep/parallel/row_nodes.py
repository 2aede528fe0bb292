"""Rows that ranks share, as operators: what a captured graph has in the place of `RankRows` (see `nodes`).

Sizes are arguments, since a share does not tell how many rows there are in all. A rank's graph depends on its place:
what sums over rows is taken over from the rank before and handed on, and the first rank takes nothing over. Apart from
that all ranks have the same operators in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.ops.row_share import RowShare, row_shares
from lockstep.parallel.collectives import Axis
from lockstep.parallel.nodes import Message, adding, define, define_several, sum_into
from lockstep.parallel.transport import Pending

RAW = torch.ops.lockstep_mesh


class RowNodes:
    """`lockstep.ops.contexts.HeadRows` of a graph that is being captured, for numbers of rows with one remainder."""

    def __init__(self, axis: str, share: RowShare) -> None:
        self.axis, self.share = axis, share

    def own(self, whole: Tensor) -> Tensor:
        first, count = self.share.run(len(whole))
        return whole.narrow(0, first, count)

    def gather(self, own: Tensor) -> Tensor:
        return self._done(RAW.gather_rows(own.contiguous(), self._whole(own), self.share.step, self.axis))

    def to_heads(self, own: Tensor) -> Tensor:
        count, heads = self._whole(own), own.shape[1] // self.share.members
        return self._done(RAW.rows_to_heads(own.contiguous(), count, heads, self.share.step, self.axis))

    def to_rows(self, heads: Tensor) -> Tensor:
        count, width = self.share.run(len(heads))[1], heads.shape[1] * self.share.members
        return self._done(RAW.heads_to_rows(heads.contiguous(), count, width, self.share.step, self.axis))

    def add(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        count = self.share.run(len(part))[1]
        return self._done(RAW.add_rows(part.contiguous(), count, dtype, self.share.step, self.axis))

    def total(self, part: Tensor) -> Tensor:
        return adding(self.axis)(part, part.dtype)

    def hand_on(self, go_on: Callable[[Tensor | None], Tensor], shape: Sequence[int]) -> Tensor:
        before = None
        if self.share.index > 0:
            before = self._done(RAW.take_over(list(shape), self.axis))
        return self._done(RAW.hand_on(go_on(before).contiguous(), self.axis))

    def _whole(self, own: Tensor) -> int:
        return self.share.all_rows(self.share.units(len(own)))

    def _done(self, begun: Tensor) -> Tensor:
        found: Tensor = RAW.wait(begun, self.axis)
        return found


def _gather_rows(axis: Axis, out: Tensor, own: Tensor, count: int, step: int) -> Message:
    return _into_runs(axis, [own] * axis.size, out, step)


def _rows_to_heads(axis: Axis, out: Tensor, own: Tensor, count: int, heads: int, step: int) -> Message:
    return _into_runs(axis, own.split(heads, dim=1), out, step)


def _into_runs(axis: Axis, outgoing: Sequence[Tensor], out: Tensor, step: int) -> Message:
    """out takes every member's rows; outgoing: what each is sent."""
    runs = out.split(row_shares(len(out), axis.size, step))
    runs[axis.index].copy_(outgoing[axis.index])
    pending = axis.begin_exchange(outgoing, runs)
    return Message(lambda: _arrive(pending))


def _heads_to_rows(axis: Axis, out: Tensor, heads: Tensor, count: int, width: int, step: int) -> Message:
    outgoing = heads.split(row_shares(len(heads), axis.size, step))
    places = out.split(heads.shape[1], dim=1)
    incoming = [torch.empty_like(outgoing[axis.index]) for _ in places]
    pending = axis.begin_exchange(outgoing, incoming)
    places[axis.index].copy_(outgoing[axis.index])

    def end() -> None:
        _arrive(pending)
        for i, place in enumerate(places):
            if i != axis.index:
                place.copy_(incoming[i])

    return Message(end)


def _add_rows(axis: Axis, out: Tensor, part: Tensor, count: int, dtype: torch.dtype, step: int) -> Message:
    return sum_into(axis.begin_add_part(part.split(row_shares(len(part), axis.size, step)), dtype), [out])


def _add_rows_of_several(
    axis: Axis, outs: Sequence[Tensor], parts: Sequence[Tensor], count: int, dtype: torch.dtype, step: int
) -> Message:
    runs = zip(*(part.split(row_shares(len(part), axis.size, step)) for part in parts), strict=True)
    sent = [torch.cat([run.reshape(-1) for run in member]) for member in runs]
    return sum_into(axis.begin_add_part(sent, dtype), outs)


def _take_over(axis: Axis, out: Tensor, shape: Sequence[int]) -> Message:
    pending = [axis.receive(out, axis.index - 1)]
    return Message(lambda: _arrive(pending))


def _hand_on(axis: Axis, out: Tensor, value: Tensor) -> Message:
    last = axis.size - 1
    if axis.index == last:
        out.copy_(value)
        pending = [axis.send(value, i) for i in range(last)]
    else:
        pending = [axis.send(value, axis.index + 1), axis.receive(out, last)]
    return Message(lambda: _arrive(pending))


def _arrive(pending: Sequence[Pending]) -> None:
    for work in pending:
        work.wait()


def _own_rows(part: Tensor, count: int, dtype: torch.dtype, step: int) -> Tensor:
    return part.new_empty(count, *part.shape[1:], dtype=dtype)


define(
    "gather_rows",
    "Tensor own, int count, int step",
    lambda own, n, step: own.new_empty(n, *own.shape[1:]),
    _gather_rows,
)
define(
    "rows_to_heads", "Tensor own, int count, int heads, int step",
    lambda own, n, heads, step: own.new_empty(n, heads, *own.shape[2:]), _rows_to_heads,
)  # fmt: skip
define(
    "heads_to_rows", "Tensor heads, int count, int width, int step",
    lambda heads, n, width, step: heads.new_empty(n, width, *heads.shape[2:]), _heads_to_rows,
)  # fmt: skip
define("add_rows", "Tensor part, int count, ScalarType dtype, int step", _own_rows, _add_rows)
define_several(
    "add_rows_coalesced", "int count, ScalarType dtype, int step", _own_rows, _add_rows_of_several, "add_rows"
)
define("take_over", "int[] shape", lambda shape: torch.empty(shape), _take_over)
define("hand_on", "Tensor value", torch.empty_like, _hand_on)
