"""The planner against published and measured runs: the accuracy that the project promises."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.plan.published import activations, error_table, llama, megatron, vtrain

ORACLES = Path(__file__).parents[1] / "oracles"


@pytest.fixture(scope="module")
def multi():
    return vtrain(ORACLES, "multi")


@pytest.fixture(scope="module")
def single():
    return vtrain(ORACLES, "single")


def mean(errors):
    return np.abs(errors).mean()


def test_activation_memory_is_exact():
    assert activations(ORACLES) <= 0.0005 + 1e-9


def test_megatron_iterations_without_any_fit():
    assert mean(megatron(ORACLES)) <= 0.10


def test_llama3_without_any_fit():
    assert mean(llama(ORACLES)) <= 0.15  # no promise is made for this table: a guard


def test_multi_node_cross_validation(multi):
    predicted = multi.folded()
    assert mean(predicted / multi.seconds - 1) <= 0.06
    assert multi.regret(predicted) <= 5.0


def test_single_node_cross_validation(single):
    predicted = single.folded()
    assert mean(predicted / single.seconds - 1) <= 0.08
    assert single.regret(predicted) <= 5.0


def test_physical_factors_alone(single):
    assert mean(single.folds(layers=False)) <= 0.08


def test_a_model_size_that_was_never_measured(multi, single):
    for table in (multi, single):
        for size, error in table.left_out().items():
            assert error <= 10.0, size


def test_described_machine_without_any_measurement(multi):
    assert mean(multi.described()) <= 0.10


def test_folder_without_tables(tmp_path):
    with pytest.raises(LockstepError, match="no oracle tables"):
        error_table(tmp_path)
