"""The sum over micro-batches: the trainer's bits, whatever the order in which gradients come, and where."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.parallel.tree import Node, NodeTree, nodes_of, root, spread
from lockstep.train import tree as trainer


def leaves(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(5, generator=generator) * 10.0 ** (i % 7) for i in range(count)]


def in_order(values: list[torch.Tensor], group: int = 1) -> torch.Tensor:
    found = trainer.GradientTree(group)
    for value in values:
        found.push([value.clone()])
    return found.total()[0]


@given(st.integers(1, 33), st.integers(1, 5), st.randoms())
def test_gradients_in_any_order_give_the_trainers_bits(count: int, group: int, order: random.Random) -> None:
    values = leaves(count * group)
    tree = NodeTree(count, group)
    for number in order.sample(range(count * group), count * group):
        tree.put(number, values[number].clone())
    assert torch.equal(tree.total(), in_order(values, group))
    assert not tree.nodes


@given(st.integers(1, 33), st.integers(1, 5), st.integers(1, 9), st.randoms())
def test_ranks_combine_their_nodes_to_the_trainers_bits(
    count: int, group: int, ranks: int, order: random.Random
) -> None:
    values, whole = leaves(count * group), NodeTree(count)
    parts = []
    for run in spread(count, ranks):
        part = NodeTree(count, group)
        for number in order.sample(range(run.start * group, run.stop * group), len(run) * group):
            part.put(number, values[number].clone())
        assert sorted(part.nodes) == sorted(nodes_of(run.start, run.stop, count))
        parts += part.nodes.items()
    for node, value in order.sample(parts, len(parts)):
        whole.put_node(node, value)
    assert torch.equal(whole.total(), in_order(values, group))


def test_an_aligned_run_of_a_power_of_two_is_one_node() -> None:
    assert nodes_of(4, 8, 16) == [Node(2, 1)]
    assert nodes_of(0, 16, 16) == [root(16)]
    assert spread(7, 3) == [range(0, 3), range(3, 5), range(5, 7)]
    assert nodes_of(0, 3, 7) == [Node(1, 0), Node(0, 2)]
