"""The gradient tree and the global norm: their order depends on nothing but the number of leaves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lockstep.ops import operators
from lockstep.ops.tree import tree_sum
from lockstep.train.tree import GradientTree, global_norm, tree_total

BITWISE, PLAIN = operators("bitwise"), operators("fast")


def leaves(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    # Wide exponents, so that another order of the sums gives other bits.
    return [torch.randn(1001, generator=generator) * 10.0 ** (i % 7 - 3) for i in range(count)]


def by_definition(gradients: list[Tensor]) -> Tensor:
    """Split at the largest power of two below the number of leaves, recursively."""
    if len(gradients) == 1:
        return gradients[0]
    left = 1 << (len(gradients) - 1).bit_length() - 1
    return by_definition(gradients[:left]) + by_definition(gradients[left:])


def summed(gradients: list[Tensor], group: int = 1) -> Tensor:
    tree = GradientTree(group)
    for gradient in gradients:
        tree.push([gradient.clone()])
    return tree.total()[0]


@pytest.mark.parametrize("count", range(1, 18))
def test_the_tree_is_the_one_defined(count: int) -> None:
    assert torch.equal(summed(leaves(count)), by_definition(leaves(count)))


@pytest.mark.parametrize(("groups", "size"), [(1, 9), (3, 4), (4, 3), (5, 2)])
def test_the_gradients_of_a_group_are_added_ascending(groups: int, size: int) -> None:
    gradients = leaves(groups * size)
    chains = [gradients[i * size] for i in range(groups)]
    for place in range(1, size):
        chains = [chain + gradients[i * size + place] for i, chain in enumerate(chains)]
    assert torch.equal(summed(gradients, size), by_definition(chains))
    # A group of two is a pair of the tree; a longer one is another order.
    assert torch.equal(summed(gradients, size), summed(gradients)) == (size == 2)


def test_ranks_with_aligned_runs_compute_nodes_of_the_same_tree() -> None:
    """What makes data parallel exact: 8 leaves at once, or 2 ranks of 4, or 4 ranks of 2."""
    gradients = leaves(8)
    for ranks in (2, 4):
        share = 8 // ranks
        parts = [summed(gradients[r * share : (r + 1) * share]) for r in range(ranks)]
        assert torch.equal(summed(parts), summed(gradients))


def test_a_plain_running_sum_gives_other_bits() -> None:
    """The oracle can fail: order matters for these leaves."""
    gradients = leaves(8)
    assert not torch.equal(summed(gradients), sum(gradients[1:], gradients[0]))


@pytest.mark.parametrize("group", [1, 3])
def test_sums_alive_are_logarithmic_in_the_groups(group: int) -> None:
    merged = list[int]()
    tree = GradientTree(group, lambda tensors: merged.append(len(tensors)))
    for i, gradient in enumerate(leaves(33), 1):
        tree.push([gradient])
        assert i - len(merged) == (i // group).bit_count() + (i % group > 0)


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 65536, 65537, 200_001])
def test_square_sum_is_the_sum_of_squares(size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size))
    exact = math.fsum(float(v) ** 2 for v in x.tolist())
    # float64 pairwise sums: relative error below log2(n) 2**-53.
    assert float(PLAIN.square_sum(x)) == float(BITWISE.square_sum(x))
    assert float(BITWISE.square_sum(x)) == pytest.approx(exact, rel=1e-14)


def test_norm_does_not_depend_on_threads() -> None:
    gradients = [torch.randn(300_003, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    found = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.add(global_norm(gradients, BITWISE))
    torch.set_num_threads(1)
    assert len(found) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_makes_the_norm_not_finite(bad: float) -> None:
    x = torch.randn(70_000)
    x[69_999] = bad
    assert not math.isfinite(global_norm([torch.ones(3), x], BITWISE))


def test_the_largest_finite_gradients_have_a_finite_norm() -> None:
    assert math.isfinite(global_norm([torch.full((1000,), torch.finfo(torch.float32).max)], BITWISE))


def test_tree_sum_and_total() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    assert float(tree_sum(values)) == 10.0
    assert tree_total([1e16, 1.0, -1e16, 1.0]) == (1e16 + -1e16) + (1.0 + 1.0)
    assert tree_total([]) == 0.0
