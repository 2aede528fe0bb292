"""The sum over the micro-batches of a global batch, whose gradients may come in any order, on any rank.

Canonical groups of neighbouring micro-batches (mostly of one) are the leaves of a binary tree; within a group gradients
are added one after the other, ascending. Node ``(level, place)`` is the sum of leaves ``place * 2 ** level`` and on,
``2 ** level`` of them or as many as there are. Its children are added once, left to right; a node without a right
sibling is its parent. So the number of leaves and the size of a group alone define every addition (contract C5): 5
leaves give ``((g0 + g1) + (g2 + g3)) + g4``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Node(NamedTuple):
    """A node of the tree: which leaves it sums."""

    level: int
    place: int


class NodeTree:
    """One tensor's sum; `lockstep.train.tree.GradientTree` gives the same bits for leaves that come in order.

    Tensors that are put in are owned by the tree from then on (they are added into)."""

    def __init__(self, leaves: int, group: int = 1) -> None:
        """leaves: canonical groups, of so many micro-batches each."""
        self._leaves, self._group = leaves, group
        self.nodes: dict[Node, Tensor] = {}
        self._begun: dict[int, tuple[int, Tensor]] = {}
        """By group: how many of its gradients were added, and their sum."""
        self._early: dict[int, Tensor] = {}
        """By micro-batch: gradients that came before those that they are added to."""

    def put(self, micro_batch: int, gradient: Tensor) -> None:
        """Give the gradient of one micro-batch, in any order: one that comes before its turn waits."""
        self._early[micro_batch] = gradient
        leaf = micro_batch // self._group
        count, total = self._begun.pop(leaf, (0, None))
        while (following := self._early.pop(leaf * self._group + count, None)) is not None:
            total = following if total is None else total.add_(following)
            count += 1
        if total is not None and count < self._group:
            self._begun[leaf] = count, total
        elif total is not None:
            self.put_node(Node(0, leaf), total)

    def put_node(self, node: Node, value: Tensor) -> None:
        """Give a node's value, and add up as far as siblings are there."""
        while node != root(self._leaves):
            left, right = Node(node.level, node.place & ~1), Node(node.level, node.place | 1)
            if right.place << right.level < self._leaves:  # otherwise there is no sibling, and the node is its parent
                sibling = self.nodes.pop(right if node == left else left, None)
                if sibling is None:
                    break
                value = value.add_(sibling) if node == left else sibling.add_(value)
            node = Node(node.level + 1, node.place >> 1)
        self.nodes[node] = value

    def total(self) -> Tensor:
        """The root, when every gradient was put in."""
        return self.nodes.pop(root(self._leaves))


def root(leaves: int) -> Node:
    """The node that sums all leaves."""
    return Node((leaves - 1).bit_length(), 0)


def nodes_of(first: int, end: int, leaves: int) -> list[Node]:
    """The nodes that are left when leaves ``first .. end - 1`` of a tree were put in, in the order of their leaves."""
    return list(_cover(root(leaves), first, end, leaves))


def _cover(node: Node, first: int, end: int, leaves: int) -> Iterator[Node]:
    begin = node.place << node.level
    stop = min((node.place + 1) << node.level, leaves)
    if begin >= end or stop <= first or begin >= leaves:
        return
    if first <= begin and stop <= end:
        yield _highest(node, leaves)
        return
    yield from _cover(Node(node.level - 1, 2 * node.place), first, end, leaves)
    yield from _cover(Node(node.level - 1, 2 * node.place + 1), first, end, leaves)


def _highest(node: Node, leaves: int) -> Node:
    """The node, or the one above it that sums the same leaves because there is no right sibling."""
    while node != root(leaves) and node.place % 2 == 0 and (node.place + 1) << node.level >= leaves:
        node = Node(node.level + 1, node.place >> 1)
    return node


def spread(micro_batches: int, ranks: int) -> list[range]:
    """Which micro-batches each data-parallel rank works on: runs of nearly equal length, the longer ones first."""
    short, longer = divmod(micro_batches, ranks)
    starts = [rank * short + min(rank, longer) for rank in range(ranks + 1)]
    return [range(a, b) for a, b in pairwise(starts)]
