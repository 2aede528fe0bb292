"""Memory of a rank over its schedule, against the closed form of the fullest rank."""

import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.plan import Batch, Layout, load_cluster, predict, rank_memory
from lockstep.plan.coefficients import Coefficients
from lockstep.plan.columns import layout_columns
from lockstep.plan.layout import SPLIT, TWO_CHUNKS
from lockstep.plan.memory import memory
from lockstep.plan.named_shape import model_shape
from lockstep.plan.per_stage import _REPEATS, as_full, plan_simulation, stage_memory

BATCH = Batch(32, 4096)
SHAPE = model_shape("llama3-8b")


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp=8, fsdp=3),
        Layout(pp=4),
        Layout(pp=4, recompute="full"),
        Layout(pp=4, tp=2, recompute_layers=3),
        Layout(pp=4, schedule="gpipe"),
        Layout(pp=4, schedule="zb-h1"),
        Layout(pp=4, schedule="zb-h2"),
        Layout(pp=4, schedule="zb-v", chunks=2),
        Layout(pp=4, schedule="v-half", chunks=2),
        Layout(pp=4, schedule="interleaved", chunks=2),
        Layout(pp=4, dp=2, gradient_groups=4),
        Layout(pp=4, gradient_groups=1, recompute="full"),
        Layout(dp=8, fsdp=3, gradient_groups=8),
    ],
)
def test_fullest_rank_is_the_closed_form(layout):
    ranks = range(0, layout.devices, layout.devices // layout.pp)
    fullest = max(rank_memory("llama3-8b", layout, BATCH, rank).peak for rank in ranks)
    assert predict("llama3-8b", layout, f"{layout.devices}xH100", BATCH).memory_gb == pytest.approx(fullest / 1e9)
    found = float(memory(layout_columns(SHAPE, [layout], BATCH)).total[0])
    # The closed form of all layouts at once does not go through the schedule: a split backward and two chunks per
    # device are estimated.
    assert found == pytest.approx(fullest, rel=0.1 if layout.schedule in (*SPLIT, "interleaved") else 0.05)


@pytest.mark.parametrize("schedule", _REPEATS)
@pytest.mark.parametrize("more", [{"gradient_groups": 1}, {"dp": 2, "fsdp": 2, "gradient_groups": 2}])
def test_a_pipeline_that_repeats_is_as_full_with_fewer_micro_batches(schedule, more):
    layout = Layout(pp=4, schedule=schedule, chunks=2 if schedule in TWO_CHUNKS else 1, **more)
    for each, fewer in ((24, 24), (48, 20), (67, 23)):
        batch = Batch(layout.dp * each, 4096)
        short = as_full(layout, batch)
        assert layout.micro_batches(short) == fewer
        for stage in range(4):
            fewer_peak = stage_memory(SHAPE, layout, short, stage, batch).peak
            assert fewer_peak == stage_memory(SHAPE, layout, batch, stage).peak


def test_a_drawn_pipeline_has_as_many_groups_as_its_micro_batches_can_be_cut_into():
    layout = Layout(dp=4, gradient_groups=8)  # three of each are drawn, and 12 are no eight groups
    run = plan_simulation(SHAPE, layout, Batch(64, 4096), load_cluster("4xH100"), Coefficients())
    assert len(run.held[0]) > 0
    assert max(run.held[0]) < 1.01 * stage_memory(SHAPE, layout, Batch(64, 4096), 0).peak / 1e9


def test_first_stage_holds_most_under_1f1b():
    peaks = [max(n for _, n in rank_memory("llama3-8b", Layout(pp=4), BATCH, rank).steps) for rank in range(4)]
    # The last keeps the gradients of its head and of its input, and what goes into its norm.
    head = 4 * 128256 * 4096 + (2 + 4) * 4096 * 4096
    assert np.allclose(peaks, [peaks[0] * (4 - i) / 4 + head * (i == 3) for i in range(4)])


def test_steps_rise_and_fall():
    found = rank_memory("llama3-8b", Layout(pp=4), BATCH, 0)
    assert [name for name, _ in found.steps[:4]] == ["F0", "F1", "F2", "F3"]
    assert np.argmax([held for _, held in found.steps]) == 3
    # 15 = 0b1111: four partial sums of the gradient wait while the leaf is made, and four micro-batches are in flight
    assert found.peak_name == "BW15"
    assert found.moments[found.peak_step]["gradients"] == pytest.approx(5 * found.fixed["weights"])
    assert found.at(0) < found.at(3) < found.peak
    assert sum(name.startswith("F") for name, _ in found.steps) == 32


def test_rank_decides_the_stage():
    layout = Layout(pp=2, dp=2, tp=2)
    assert [rank_memory("llama3-8b", layout, BATCH, rank).stage for rank in range(8)] == [0] * 4 + [1] * 4
    with pytest.raises(LockstepError, match="has ranks 0 to 7"):
        rank_memory("llama3-8b", layout, BATCH, 8)
