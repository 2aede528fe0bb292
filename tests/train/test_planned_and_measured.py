"""The comparison of predicted with measured layouts: its arithmetic, and (slow) the run itself."""

import pytest

from lockstep.plan import load_cluster, predict
from lockstep.train.measure import LayoutSteps
from lockstep.train.planned_and_measured import BATCH, LAYOUTS, SHAPE, compare, compared, mean_error, regret

CLUSTER = load_cluster("2xV100")


def found(factor: float) -> list[LayoutSteps]:
    """Steps that take a fixed multiple of what the description says."""
    times = [factor * predict(SHAPE, layout, CLUSTER, BATCH).step_s for layout in LAYOUTS]
    return [LayoutSteps({}, [t], [0, 0], {}) for t in times]


def test_layouts_cover_what_two_processes_run():
    assert len(LAYOUTS) >= 12
    assert {layout.schedule for layout in LAYOUTS if layout.pp == 2} >= {"1f1b", "gpipe", "zb-h1", "interleaved"}
    assert any(layout.recompute == "full" for layout in LAYOUTS)
    assert {layout.recompute for layout in LAYOUTS if layout.tp == 2} == {"none", "full"}
    assert all(layout.devices == 2 for layout in LAYOUTS)


def test_what_the_description_says_is_predicted_exactly():
    rows = compared(found(1.0), CLUSTER)
    assert mean_error(rows) < 1e-3
    assert regret(rows) == 0.0


def test_regret_is_of_the_chosen_layout():
    steps = found(1.0)
    best = min(range(len(steps)), key=lambda i: steps[i].step_s)
    steps[best] = LayoutSteps({}, [100 * steps[best].step_s], [0, 0], {})
    rows = compared(steps, CLUSTER)
    chosen = min(rows, key=lambda row: row.predicted)
    assert regret(rows) == pytest.approx(chosen.measured / min(row.measured for row in rows) - 1)


@pytest.mark.slow
def test_this_machine(tmp_path):
    """Minutes, on a machine that does nothing else: pytest -m slow tests/train/test_planned_and_measured.py"""
    from lockstep.plan.this_machine import calibrate_machine

    calibrate_machine(tmp_path / "machine.yaml")
    rows = compare(load_cluster(f"2x{tmp_path}/machine.yaml"))
    assert mean_error(rows) <= 0.15
    assert regret(rows) <= 0.05
