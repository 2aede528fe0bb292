"""The data order: a permutation per epoch, from (seed, step) alone."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lockstep.train.data import batch_at, sequence_at


@pytest.mark.parametrize("count", [1, 2, 3, 10, 16, 17, 1000, 4097])
def test_every_epoch_sees_each_sequence_once(count: int) -> None:
    for epoch in (0, 1, 5):
        seen = [sequence_at(7, epoch * count + i, count) for i in range(count)]
        assert sorted(seen) == list(range(count))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(sequence_at(seed, epoch * 100 + i, 100) for i in range(100)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_a_batch_needs_only_its_step() -> None:
    stream = [sequence_at(3, i, 50) for i in range(120)]
    assert [batch_at(3, step, 8, 50) for step in range(15)] == [stream[i : i + 8] for i in range(0, 120, 8)]


def test_the_order_is_mixed() -> None:
    """Neighbours in the order are not neighbours in the corpus: the mean distance is that of a random order, n / 3."""
    order = [sequence_at(0, i, 3000) for i in range(3000)]
    distance = sum(abs(a - b) for a, b in pairwise(order)) / 2999
    assert 900 < distance < 1100  # three standard errors of the mean are about 40


def test_the_order_is_frozen() -> None:
    """Golden values: changing the permutation would silently change every resumed run."""
    assert [sequence_at(0, i, 10) for i in range(10)] == GOLDEN


GOLDEN = [6, 1, 0, 9, 2, 7, 4, 3, 8, 5]
