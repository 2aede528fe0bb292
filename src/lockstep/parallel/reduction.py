"""The gradient of a global batch from what each data-parallel rank has of it, by the one binary tree (contract C5).

Every rank holds some nodes of the tree. The owner of a run of elements is sent that run of every node, and adds the
nodes up as a single process would. With one node per rank that moves what a ring reduce-scatter moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.model.split import expert_of
from lockstep.ops import Operators
from lockstep.ops.tree import SQUARE_BLOCK, tree_sum
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.shards import Cut, Run, Shards, joined
from lockstep.parallel.transport import Pending
from lockstep.parallel.tree import NodeTree, nodes_of, spread


class Reduction:
    """The sum of a step's gradients over micro-batches and replicas, bucket by bucket.

    A bucket is parameters that stand next to each other. They are begun from the last on, as the backward pass gives
    them, when this rank has all its micro-batches of it and of those before it: so every rank begins them in one order,
    and a bucket is on its way while the backward pass goes on. It is begun when the next gradient comes, or by `begin`:
    by then nobody holds the last one any more, which was added into a sum.
    """

    def __init__(self, tensors: Mapping[str, Tensor], shards: Shards, leaves: int, size: int, group: int = 1) -> None:
        """tensors: of the gradients' names and shapes. shards: of them, over one axis. leaves: canonical groups of all
        ranks, of which each of the axis has the gradients of a run. size: bytes of a bucket. group: micro-batches of a
        canonical group."""
        self.shards, self.leaves, self.axis = shards, leaves, shards.axis
        mine = spread(leaves, self.axis.size)
        self._nodes = [nodes_of(part.start, part.stop, leaves) for part in mine]
        self._trees = {name: NodeTree(leaves, group) for name in tensors}
        self._missing = dict.fromkeys(tensors, group * len(mine[self.axis.index]))
        self._waiting = deque(_buckets(tensors, size))
        self._begun: deque[_Bucket] = deque()
        self._result: dict[str, Tensor] = {}

    @property
    def begun(self) -> int:
        """How many buckets are on their way."""
        return len(self._begun)

    def put(self, name: str, micro_batch: int, gradient: Tensor) -> None:
        """Give the gradient of one of this rank's micro-batches, which is owned by the sum from then on."""
        self.begin()
        self._trees[name].put(micro_batch, gradient)
        self._missing[name] -= 1

    def begin(self) -> None:
        """Send off every bucket that is whole."""
        while self._waiting and not any(self._missing[each] for each in self._waiting[0]):
            self._send_off(self._waiting.popleft())

    def total(self) -> dict[str, Tensor]:
        """Whole-size tensors of which this rank's own runs hold the root of the tree; the rest is left to `collect`."""
        self.begin()
        assert not self._waiting, f"no gradient came of {self._waiting}"
        while self._begun:
            self._end(self._begun.popleft())
        return {name: self._result.pop(name) for name in self._missing}

    def _send_off(self, names: Sequence[str]) -> None:
        here, chosen = self._nodes[self.axis.index], set(names)
        held = {name: self._trees.pop(name).nodes for name in names}
        self._result |= {name: found[here[0]].contiguous() for name, found in held.items()}
        if self.axis.size == 1:
            return
        runs = [[run for run in self.shards.of(i) if run.name in chosen] for i in range(self.axis.size)]
        outgoing = [
            joined(self.shards.read({run.name: held[run.name][node]}, run) for node in here for run in theirs)
            for theirs in runs
        ]
        own = runs[self.axis.index]
        share = sum(run.size for run in own)
        sizes = [len(nodes) * share for nodes in self._nodes]
        incoming = [outgoing[i] if i == self.axis.index else torch.empty(size) for i, size in enumerate(sizes)]
        self._begun.append(_Bucket(own, incoming, self.axis.begin_exchange(outgoing, incoming)))

    def _end(self, bucket: _Bucket) -> None:
        """One tree over everything of a bucket that this rank owns at once: its runs back to back."""
        for message in bucket.pending:
            message.wait()
        if not bucket.own:
            return
        tree, sizes = NodeTree(self.leaves), [run.size for run in bucket.own]
        for received, theirs in zip(bucket.incoming, self._nodes, strict=True):
            for node, values in zip(theirs, received.view(len(theirs), -1), strict=True):
                tree.put_node(node, values)
        for run, values in zip(bucket.own, tree.total().split(sizes), strict=True):
            self.shards.write(self._result, run, values)


class _Bucket(NamedTuple):
    """A bucket on its way: this rank's runs of it, what comes in from each rank, and the messages."""

    own: list[Run]
    incoming: list[Tensor]
    pending: list[Pending]


def _buckets(tensors: Mapping[str, Tensor], size: int) -> list[list[str]]:
    """Names from the last on, in lists of at least so many bytes."""
    found: list[list[str]] = [[]]
    held = 0
    for name in reversed(list(tensors)):
        if held >= size:
            found.append([])
            held = 0
        found[-1].append(name)
        held += tensors[name].nbytes
    return found


def global_norm(
    gradient: Mapping[Run, Tensor], shards: Shards, cuts: Mapping[str, Cut], names: list[str], mesh: Mesh,
    ops: Operators,
) -> float:  # fmt: skip
    """The root of the sum of all squares of the whole model's gradient, by its parameters' order ``names``.

    gradient: this rank's own runs, of which it adds up the squares. A parameter's sum is the tree over its segments of
    the tree over their blocks, so the number does not depend on the mesh. cuts: of the whole model's tensors.
    """
    blocks = {key: sums for part in shards.by_axis() for key, sums in _block_sums(gradient, part, ops).items()}
    width = max(cut.segment_count for cut in cuts.values())
    table = torch.zeros(len(names), width, dtype=torch.float64)
    place = {name: i for i, name in enumerate(names)}
    for (name, segment), sums in blocks.items():
        here = shards.cuts[name].segment_count
        before = mesh["tp"].index * here if cuts[name].segment_count > here else 0  # those of the ranks before us
        table[place[name], before + segment] = tree_sum(sums)
    for axis in ("tp", "ep", "pp"):
        table = _merged(table, axis, mesh, cuts, names)
    per_parameter = [tree_sum(table[place[name], : cuts[name].segment_count]) for name in names]
    return float(tree_sum(torch.stack(per_parameter)).sqrt())


def _merged(table: Tensor, axis: str, mesh: Mesh, cuts: Mapping[str, Cut], names: list[str]) -> Tensor:
    if mesh[axis].size == 1:
        return table
    if axis == "pp":
        return mesh["pp"].merge(table)
    alone = [cuts[name].segment_count > 1 if axis == "tp" else expert_of(name) is not None for name in names]
    # What is not cut is the same on every tensor-parallel rank, and counted once; so is what is no expert's on ``ep``.
    return torch.where(torch.tensor(alone)[:, None], mesh[axis].merge(table), table)


def _block_sums(gradient: Mapping[Run, Tensor], shards: Shards, ops: Operators) -> dict[tuple[str, int], Tensor]:
    """By parameter and segment, the sum of squares of each block, float64: the ranks' own ones put together."""
    first: dict[tuple[str, int], int] = {}
    count = 0
    for run in shards.runs:
        first.setdefault((run.name, run.segment), count - run.start // SQUARE_BLOCK)
        count += -(-run.size // SQUARE_BLOCK)
    sums = torch.zeros(count, dtype=torch.float64)
    for run in shards.own:
        at = first[run.name, run.segment] + run.start // SQUARE_BLOCK
        for i, block in enumerate(gradient[run].split(SQUARE_BLOCK)):
            sums[at + i] = ops.square_sum(block)
    sums = shards.axis.merge(sums)
    starts = [*first.values(), count]
    return {key: sums[a:b] for key, a, b in zip(first, starts, starts[1:], strict=False)}
