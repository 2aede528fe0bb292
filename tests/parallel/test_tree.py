"""The tree over micro-batches: the trainer's bits, whatever the order and the spread of the leaves."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.parallel.tree import Node, NodeTree, nodes_of, root, spread
from lockstep.train import tree as trainer


def leaves(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(5, generator=generator) * 10.0 ** (i % 7) for i in range(count)]


def in_order(values: list[torch.Tensor]) -> torch.Tensor:
    found = trainer.GradientTree()
    for value in values:
        found.push([value.clone()])
    return found.total()[0]


@given(st.integers(1, 33), st.randoms())
def test_leaves_in_any_order_give_the_trainers_bits(count: int, order: random.Random) -> None:
    values = leaves(count)
    tree = NodeTree(count)
    for leaf in order.sample(range(count), count):
        tree.put(leaf, values[leaf].clone())
    assert torch.equal(tree.total(), in_order(values))
    assert not tree.nodes


@given(st.integers(1, 33), st.integers(1, 9), st.randoms())
def test_ranks_combine_their_nodes_to_the_trainers_bits(count: int, ranks: int, order: random.Random) -> None:
    values, whole = leaves(count), NodeTree(count)
    parts = []
    for run in spread(count, ranks):
        part = NodeTree(count)
        for leaf in order.sample(list(run), len(run)):
            part.put(leaf, values[leaf].clone())
        assert sorted(part.nodes) == sorted(nodes_of(run.start, run.stop, count))
        parts += part.nodes.items()
    for node, value in order.sample(parts, len(parts)):
        whole.put_node(node, value)
    assert torch.equal(whole.total(), in_order(values))


def test_an_aligned_run_of_a_power_of_two_is_one_node() -> None:
    assert nodes_of(4, 8, 16) == [Node(2, 1)]
    assert nodes_of(0, 16, 16) == [root(16)]
    assert spread(7, 3) == [range(0, 3), range(3, 5), range(5, 7)]
    assert nodes_of(0, 3, 7) == [Node(1, 0), Node(0, 2)]
