"""The step time: bubbles against the simulator, work against FLOPs, communication against what must hold."""

import dataclasses

import numpy as np
import pytest

from lockstep.plan import (
    Batch,
    Coefficients,
    Layout,
    StageTimes,
    load_cluster,
    model_shape,
    predict,
    schedule,
    simulate,
)
from lockstep.plan.columns import layout_columns
from lockstep.plan.compute import layer_time
from lockstep.plan.steptime import _bubble, step_time

ONE = Coefficients()
CLUSTER = load_cluster("64xH100")
SHAPE = model_shape("llama3-8b")
MIXED = dataclasses.replace(SHAPE, states="mixed")
BATCH = Batch(128, 4096)


def times(*layouts, shape=SHAPE, cluster=CLUSTER, factors=ONE):
    return step_time(layout_columns(shape, layouts, BATCH), cluster, factors)


@pytest.mark.parametrize(
    ("name", "chunks", "tolerance"),
    [
        ("gpipe", 1, 1e-9),
        ("1f1b", 1, 1e-9),
        ("interleaved", 2, 1e-9),
        ("zb-h1", 1, 0.01),  # closed forms of the split schedules hold for F = B = W; these times are not equal
        ("zb-h2", 1, 0.02),
        ("zb-v", 2, 0.03),
        ("v-half", 2, 0.04),
        ("dualpipe-v", 2, 0.03),
    ],
)
@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 16), (8, 32)])
def test_bubble_is_the_simulators(name, chunks, tolerance, stages, micro_batches):
    f, b, w = 1.0, 1.15, 0.9
    layout = Layout(pp=stages, schedule=name, chunks=chunks)
    rows = layout_columns(SHAPE, [layout], Batch(micro_batches, 128))
    bubble = _bubble(rows, *(np.array([x]) for x in (f, b, w)))[0]
    table = schedule(name, stages, micro_batches, chunks=chunks)
    run = simulate(table, StageTimes(f / chunks, b / chunks, w / chunks))
    assert micro_batches * (f + b + w) + bubble == pytest.approx(run.makespan, rel=tolerance)


def test_parts_sum_to_the_step():
    found = times(Layout(pp=4, dp=4, tp=4), Layout(dp=64, fsdp=3), Layout(dp=16, cp=2, tp=2))
    parts = ("compute", "bubble", "optimizer", "host", *(f"exposed_{axis}" for axis in ("tp", "cp", "ep", "pp", "dp")))
    assert np.allclose(sum(getattr(found, part) for part in parts), found.step, rtol=1e-12)


def test_compute_never_beats_the_matrix_peak():
    layouts = [Layout(dp=64 // tp, tp=tp, micro_batch=size) for tp in (1, 2, 8) for size in (1, 2)]
    for layout in layouts:
        assert predict(SHAPE, layout, CLUSTER, BATCH).mfu < CLUSTER.device.matrix_efficiency


def test_full_recompute_adds_a_forward():
    none, full = (
        layer_time(layout_columns(SHAPE, [Layout(recompute=kind)], BATCH), CLUSTER.device, ONE)
        for kind in ("none", "full")
    )
    assert none.again[0] == 0
    assert full.again[0] == full.forward[0]


def test_small_layers_are_bound_by_the_host():
    tiny = model_shape({"layers": 12, "hidden": 256, "heads": 4, "vocab": 1000})
    rows = layout_columns(tiny, [Layout()], Batch(1, 128))
    layer = layer_time(rows, CLUSTER.device, ONE)
    assert layer.host[0] > layer.device[0]
    slow = step_time(rows, CLUSTER, Coefficients(launch=2.0)).compute
    assert slow[0] > 1.5 * step_time(rows, CLUSTER, ONE).compute[0]


def test_tensor_parallel_costs_communication_and_leaving_the_node_more():
    inside, outside = times(Layout(dp=8, tp=8), Layout(dp=4, tp=16)).exposed_tp
    assert 0 < inside < outside / 2


def test_overlap_hides_the_reduction():
    hidden, shown = times(Layout(dp=64, bucket_mb=100), Layout(dp=64, overlap=False), shape=MIXED).exposed_dp
    assert hidden < 0.2 * shown


@pytest.mark.parametrize("level", [0, 1])
def test_this_system_sends_float32_and_gathers_when_the_backward_is_over(level):
    layouts = [Layout(dp=64, fsdp=level, bucket_mb=100), Layout(dp=64, fsdp=level, overlap=False)]
    hidden, shown = times(*layouts).exposed_dp
    assert shown == pytest.approx(2 * times(layouts[1], shape=MIXED).exposed_dp[0], rel=0.01)  # but for the latency
    assert 0.5 < hidden / shown < 0.6


def test_the_last_bucket_hides_behind_nothing_and_every_bucket_costs_its_latency():
    """One bucket hides nothing; many leave little when the backward ends, but far away each waits for its message."""
    one, many = Layout(dp=64, bucket_mb=1 << 20), Layout(dp=64, bucket_mb=100)
    plain, one, many = times(Layout(dp=64, overlap=False), one, many, shape=MIXED).exposed_dp
    assert one == plain
    assert many < 0.1 * one
    far = CLUSTER.with_level("network", latency_us=20_000)
    layouts = Layout(dp=64, bucket_mb=1), Layout(dp=64, bucket_mb=400)
    small, large = times(*layouts, shape=MIXED, cluster=far).exposed_dp
    assert large < 0.1 * small


def test_sharded_weights_cost_gathers():
    plain, sharded = times(Layout(dp=64, fsdp=1), Layout(dp=64, fsdp=3)).exposed_dp
    assert sharded > plain
    slow = CLUSTER.with_level("network", gb_s=1.0)
    assert times(Layout(dp=64, fsdp=3), cluster=slow).exposed_dp[0] > 10 * sharded


def test_context_ring_hides_behind_attention_when_slices_are_long():
    long = Batch(64, 131072)
    ring = dataclasses.replace(SHAPE, states="mixed")  # another system's: this one exchanges rows for heads
    rows = layout_columns(ring, [Layout(dp=16, cp=4)], long)
    assert step_time(rows, CLUSTER, ONE).exposed_cp[0] == 0
    slow = CLUSTER.with_level("node", gb_s=1.0).with_level("network", gb_s=0.5)
    assert step_time(rows, slow, ONE).exposed_cp[0] > 0


def test_experts_pay_for_all_to_all_and_gain_larger_products():
    shape = model_shape("qwen3-30b-a3b")
    alone, spread = times(Layout(dp=64, fsdp=3), Layout(dp=64, ep=8, fsdp=3), shape=shape).exposed_ep
    assert alone == 0
    assert spread > 0


def test_layer_factors_scale_only_their_shape():
    rows = layout_columns(SHAPE, [Layout(dp=64), Layout(dp=32, tp=2)], BATCH)
    from lockstep.plan.coefficients import layer_keys

    factors = Coefficients(layer={layer_keys(rows)[0]: 1.5})
    before, after = step_time(rows, CLUSTER, ONE).compute, step_time(rows, CLUSTER, factors).compute
    assert after[0] > 1.3 * before[0]
    assert after[1] == before[1]
