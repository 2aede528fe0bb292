"""Memory in closed form: the published activation table, and the general terms against it and against counting."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.plan import Batch, Layout, activation_bytes
from lockstep.plan.columns import layout_columns
from lockstep.plan.kept_bytes import layer_bytes
from lockstep.plan.memory import PARTS, in_flight, memory
from lockstep.plan.named_shape import model_shape
from lockstep.plan.parameters import parameters, sharded_parameters
from lockstep.plan.published import activations
from lockstep.plan.shape import megatron_gpt

ORACLES = Path(__file__).parents[1] / "oracles"


def test_published_table():
    assert activations(ORACLES) <= 0.0005 + 1e-9  # the table prints three decimals


def test_unknown_recompute():
    with pytest.raises(LockstepError, match="expected one of none, selective, full"):
        activation_bytes(64, 4, 128, 1, 2, recompute="some")


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_general_terms_give_the_published_formula(kind, tp, sequence_parallel):
    shape = megatron_gpt(8, 1024, 16, 2048)
    layout = Layout(tp=tp, micro_batch=2, recompute=kind, sequence_parallel=sequence_parallel)
    rows = layout_columns(shape, [layout], Batch(4, 2048))
    asked = {"tp": tp, "sequence_parallel": sequence_parallel, "recompute": kind}
    if kind == "full" and sequence_parallel:
        asked["sequence_parallel"] = False  # the paper keeps whole inputs; sharded inputs are kept sharded here
    whole = activation_bytes(1024, 16, 2048, 2, 1, **asked) / (tp if kind == "full" and sequence_parallel else 1)
    assert layer_bytes(rows)[0] == whole


def test_parameters_and_states():
    shape = model_shape("llama3-8b")
    rows = layout_columns(shape, [Layout(), Layout(dp=8, fsdp=3), Layout(pp=4)], Batch(64, 2048))
    assert parameters(rows)[0] == shape.parameters
    assert parameters(rows)[2] < shape.parameters / 3.5
    held = memory(rows)
    # float32 masters and moments; 64 micro-batches: six partial sums of the tree wait while the last leaf is made
    assert (held.weights + held.optimizer)[0] == 12.0 * shape.parameters
    assert held.gradients[0] == 4.0 * 7 * shape.parameters
    mixed = layout_columns(replace(shape, states="mixed"), [Layout(), Layout(dp=8, fsdp=3)], Batch(64, 2048))
    held = memory(mixed)
    assert (held.weights + held.gradients + held.optimizer)[0] == 18.0 * shape.parameters
    assert (held.weights + held.gradients + held.optimizer)[1] == pytest.approx(18.0 * shape.parameters / 8)


def test_parts_sum_to_the_total():
    rows = layout_columns(model_shape("llama3-8b"), [Layout(tp=2, dp=4), Layout(pp=8)], Batch(64, 4096))
    held = memory(rows)
    assert np.allclose(sum(getattr(held, part) for part in PARTS), held.total, rtol=1e-12)


def test_experts_are_split_over_their_ranks():
    shape = model_shape("mixtral-8x7b")
    rows = layout_columns(shape, [Layout(dp=8), Layout(dp=8, ep=8)], Batch(64, 4096))
    one, eighth = parameters(rows)
    experts = shape.layers * shape.experts * shape.expert_parameters
    assert one - eighth == pytest.approx(experts * 7 / 8)


def test_sharding_splits_everything_once():
    shape = model_shape("mixtral-8x7b")
    rows = layout_columns(shape, [Layout(dp=64, fsdp=3), Layout(dp=64, ep=8, fsdp=3)], Batch(64, 4096))
    assert sharded_parameters(rows, 3) == pytest.approx(shape.parameters / 64)


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [("1f1b", 1, 8), ("gpipe", 1, 64), ("zb-h2", 1, 15), ("zb-v", 2, 8), ("v-half", 2, 5), ("interleaved", 2, 11.5)],
)
def test_in_flight_is_what_the_simulator_holds(schedule, chunks, expected):
    from lockstep.plan import schedule as make
    from lockstep.plan import simulate
    from lockstep.plan.simulate import StageTimes

    layout = Layout(pp=8, schedule=schedule, chunks=chunks)
    rows = layout_columns(model_shape("llama3-8b"), [layout], Batch(64, 128))
    assert in_flight(rows)[0] == expected
    run = simulate(make(schedule, 8, 64, chunks=chunks), StageTimes(1.0, 1.0, 1.0))
    assert run.peak_activation == pytest.approx(expected, abs=0.5 if chunks > 1 else 0)
