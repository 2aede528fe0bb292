"""The gradient of a global batch from what each data-parallel rank has of it, by the one binary tree (contract C5).

Every rank holds some nodes of the tree. The owner of a run of elements is sent that run of every node, and adds the
nodes up as a single process would. With one node per rank that moves what a ring reduce-scatter moves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.ops import Operators
from lockstep.ops.tree import SQUARE_BLOCK, tree_sum
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.shards import Cut, Shards, joined
from lockstep.parallel.tree import Node, NodeTree, nodes_of, spread


def reduce_runs(trees: Mapping[str, NodeTree], shards: Shards, leaves: int) -> dict[str, Tensor]:
    """Whole-size tensors of which this rank's own runs hold the root of the tree; the rest is left to `collect`.

    trees: by parameter, with this rank's leaves put in; they are used up.
    """
    axis = shards.axis
    nodes = [nodes_of(part.start, part.stop, leaves) for part in spread(leaves, axis.size)]
    held = {name: tree.nodes for name, tree in trees.items()}
    result = {name: found[nodes[axis.index][0]].contiguous() for name, found in held.items()}
    if axis.size == 1:
        return result
    outgoing = [
        joined(shards.read({run.name: held[run.name][node]}, run) for node in nodes[axis.index] for run in shards.of(i))
        for i in range(axis.size)
    ]
    share = sum(run.size for run in shards.own)
    incoming = [torch.empty(0 if i == axis.index else len(nodes[i]) * share) for i in range(axis.size)]
    incoming[axis.index] = outgoing[axis.index]
    axis.exchange(outgoing, incoming)
    _add_up(incoming, nodes, shards, leaves, result)
    return result


def _add_up(
    incoming: list[Tensor], nodes: list[list[Node]], shards: Shards, leaves: int, result: dict[str, Tensor]
) -> None:
    """One tree over everything this rank owns at once: its runs back to back."""
    tree, sizes = NodeTree(leaves), [run.size for run in shards.own]
    for received, theirs in zip(incoming, nodes, strict=True):
        for node, values in zip(theirs, received.view(len(theirs), -1), strict=True):
            tree.put_node(node, values)
    for run, values in zip(shards.own, tree.total().split(sizes), strict=True):
        shards.write(result, run, values)


def global_norm(
    gradient: Mapping[str, Tensor], shards: Shards, cuts: Mapping[str, Cut], names: list[str], mesh: Mesh,
    ops: Operators,
) -> float:  # fmt: skip
    """The root of the sum of all squares of the whole model's gradient, by its parameters' order ``names``.

    Each rank squares its own runs. A parameter's sum is the tree over its segments of the tree over their blocks, so
    the number does not depend on the mesh. cuts: of the whole model's tensors.
    """
    blocks = _block_sums(gradient, shards, ops)
    width = max(cut.segment_count for cut in cuts.values())
    table = torch.zeros(len(names), width, dtype=torch.float64)
    place = {name: i for i, name in enumerate(names)}
    for (name, segment), sums in blocks.items():
        here = shards.cuts[name].segment_count
        before = mesh["tp"].index * here if cuts[name].segment_count > here else 0  # those of the ranks before us
        table[place[name], before + segment] = tree_sum(sums)
    for axis in ("tp", "pp"):
        table = _merged(table, axis, mesh, cuts, names)
    per_parameter = [tree_sum(table[place[name], : cuts[name].segment_count]) for name in names]
    return float(tree_sum(torch.stack(per_parameter)).sqrt())


def _merged(table: Tensor, axis: str, mesh: Mesh, cuts: Mapping[str, Cut], names: list[str]) -> Tensor:
    if axis == "pp":
        return mesh["pp"].merge(table)
    replicated = torch.tensor([cuts[name].segment_count == 1 for name in names])[:, None]
    # What is not cut is the same on every tensor-parallel rank, and counted once.
    return torch.where(replicated, table, mesh["tp"].merge(table))


def _block_sums(gradient: Mapping[str, Tensor], shards: Shards, ops: Operators) -> dict[tuple[str, int], Tensor]:
    """By parameter and segment, the sum of squares of each block, float64: the ranks' own ones put together."""
    first: dict[tuple[str, int], int] = {}
    count = 0
    for run in shards.runs:
        first.setdefault((run.name, run.segment), count - run.start // SQUARE_BLOCK)
        count += -(-run.size // SQUARE_BLOCK)
    sums = torch.zeros(count, dtype=torch.float64)
    for run in shards.own:
        at = first[run.name, run.segment] + run.start // SQUARE_BLOCK
        for i, block in enumerate(shards.read(gradient, run).split(SQUARE_BLOCK)):
            sums[at + i] = ops.square_sum(block)
    sums = shards.axis.merge(sums)
    starts = [*first.values(), count]
    return {key: sums[a:b] for key, a, b in zip(first, starts, starts[1:], strict=False)}
