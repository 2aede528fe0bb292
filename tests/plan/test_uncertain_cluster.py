"""A description that says it is uncertain is moved further from by calibration."""

from dataclasses import replace
from pathlib import Path

import pytest

import lockstep.plan
from lockstep.errors import LockstepError
from lockstep.plan import Batch, Layout, Measured, calibrate, load_cluster, model_shape, predict

SHAPE, BATCH = model_shape("llama3-1b"), Batch(16, 2048)
LAYOUTS = [Layout(dp=2, micro_batch=n) for n in (1, 2, 4)]


def test_calibration_reaches_a_machine_four_times_as_slow():
    sure = load_cluster("2xA100-80")
    rows = [Measured(SHAPE, x, BATCH, 4 * predict(SHAPE, x, sure, BATCH).step_s) for x in LAYOUTS]
    error = {}
    for cluster in (sure, replace(sure, uncertainty=6.0)):
        factors = replace(calibrate(rows, cluster), layer={})
        error[cluster.uncertainty] = max(
            abs(predict(SHAPE, row.layout, cluster, BATCH, factors).step_s / row.step_s - 1) for row in rows
        )
    assert error[6.0] < 0.5 * error[1.0]


def test_it_must_be_a_positive_number(tmp_path):
    text = (Path(lockstep.plan.__file__).parent / "clusters" / "H100.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text + "uncertainty: -1\n")
    with pytest.raises(LockstepError, match="uncertainty is -1; give a finite number above 0"):
        load_cluster(f"2x{tmp_path}/mine.yaml")
