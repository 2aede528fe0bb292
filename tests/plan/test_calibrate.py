"""Calibration: recovers known factors, stays at the description without evidence, refuses bad rows, round-trips."""

import dataclasses

import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.plan import Batch, Coefficients, Layout, Measured, calibrate, load_cluster, model_shape, predict
from lockstep.plan.calibrate import load_measured, measured_columns, measured_row
from lockstep.plan.coefficients import load_coefficients, save_coefficients
from lockstep.plan.fit_report import fit_text
from lockstep.plan.steptime import step_time

CLUSTER = load_cluster("16xA100-80")
LAYOUTS = [
    Layout(pp=pp, dp=16 // pp // tp, tp=tp, micro_batch=size, recompute=kind)
    for pp in (1, 2, 4)
    for tp in (1, 2, 4)
    for size in (1, 2)
    for kind in ("none", "full")
]


ROW = {"model": "llama3-8b", "layout": {"dp": 8, "micro_batch": 2}, "sequences": 64, "seq": 4096, "step_s": 3.0}


def runs(truth):
    shape, batch = model_shape("llama3-8b"), Batch(128, 2048)
    rows = [Measured(shape, layout, batch, 1.0) for layout in LAYOUTS]
    seconds = step_time(measured_columns(rows), CLUSTER, truth).step
    return [dataclasses.replace(row, step_s=float(s)) for row, s in zip(rows, seconds, strict=True)]


def errors(rows, factors):
    found = step_time(measured_columns(rows), CLUSTER, factors).step
    return np.abs(found / [row.step_s for row in rows] - 1)


def test_known_machine_is_recovered():
    rows = runs(Coefficients(matrix=0.8, node_bandwidth=0.7, network_bandwidth=0.5))
    before, after = errors(rows, Coefficients()), errors(rows, calibrate(rows, CLUSTER))
    assert before.mean() > 0.15
    assert after.max() < 0.02  # priors hold the factors back a little


def test_without_evidence_the_description_stands():
    found = calibrate(runs(Coefficients()), CLUSTER)
    assert all(abs(value - 1) < 0.01 for value in found.factors().values())
    assert all(abs(value - 1) < 0.01 for value in found.layer.values())


def test_a_few_odd_measurements_do_not_bend_the_rest():
    rows = runs(Coefficients())
    odd = [dataclasses.replace(row, step_s=row.step_s * 3) if i in (3, 20) else row for i, row in enumerate(rows)]
    assert np.median(errors(rows, calibrate(odd, CLUSTER))) < 0.02


def test_calibrated_prediction():
    rows = runs(Coefficients(matrix=0.8))
    factors = calibrate(rows, CLUSTER)
    found = predict("llama3-8b", rows[0].layout, CLUSTER, rows[0].batch, coefficients=factors)
    assert found.step_s == pytest.approx(rows[0].step_s, rel=0.02)


def test_rows_as_mappings(tmp_path):
    row = {"model": "llama3-8b", "layout": {"dp": 8}, "sequences": 64, "seq": 2048, "step_s": 4.0}
    flat = {
        "layers": "24", "hidden": "1024", "heads": "16", "seq": "1024", "tp": 1, "dp": 2, "pp": 1,
        "micro_batch": 1, "global_batch": 16, "iteration_ms": "641.6",
    }  # fmt: skip
    assert calibrate([row, flat]).layer
    file = tmp_path / "steps.yaml"
    file.write_text("- {model: llama3-8b, layout: {dp: 8}, sequences: 64, seq: 2048, step_s: 4.0}\n")
    assert load_measured(file)[0].step_s == 4.0


def test_bad_rows():
    with pytest.raises(LockstepError, match="no measured steps"):
        calibrate([])
    with pytest.raises(LockstepError, match="row 0 has no layout: it needs model, layout"):
        calibrate([{"model": "llama3-8b"}])
    for step_s in (0, -1, float("nan"), float("inf")):
        with pytest.raises(LockstepError, match="a measured time, is"):
            calibrate([{"model": "gpt2", "layout": {}, "sequences": 1, "seq": 8, "step_s": step_s}])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": {"dp": "x"}}, r"row 0: layout\.dp is 'x', expected a whole number"),
        ({"layout": {"dp": 0}}, "dp is 0; give a whole number from 1 to"),
        ({"layout": {"tp": 3}}, "tp 3 does not divide the 32 attention heads"),
        ({"layout": {"tq": 2}}, "row 0: layout has an unknown key 'tq': the nearest is 'tp'"),
        ({"layout": {"dp": "8"}}, r"layout\.dp is '8', expected a whole number"),
        ({"layout": {"overlap": 1}}, r"layout\.overlap is 1, expected true or false"),
        ({"layout": {"recompute": "most"}}, r"layout\.recompute is 'most', expected one of"),
        ({"layout": 5}, "layout is 5, expected a mapping"),
        ({"sequnces": 64}, "row 0 has an unknown key 'sequnces': the nearest is 'sequences'"),
        ({"step_s": "3.4"}, "step_s, a measured time, is '3.4'; give a finite number"),
        ({"step_s": 10**30}, "step_s, a measured time, is 1000.*; give a finite number above 0 and at most 1e.09"),
        ({"layout": {"pp": 10**30}}, "pp is 1000.*; give a whole number from 1 to"),
        (
            {"layout": {"pp": 2, "layers_per_stage": 5}},
            r"layout\.layers_per_stage is 5, expected a list \(each a whole number\)",
        ),
        ({"layout": {"pp": 2, "layers_per_stage": [1, 2, 3]}}, "must be 2 numbers"),
        ({"sequences": 0}, "give a whole number of at least 1"),
    ],
)
def test_rows_of_no_run(changes, message):
    with pytest.raises(LockstepError, match=message):
        calibrate([{"model": "llama3-8b", "layout": {"dp": 8}, "sequences": 64, "seq": 8, "step_s": 1, **changes}])


def test_a_row_names_its_model_and_one_that_is_far_off_is_told():
    with pytest.raises(LockstepError, match="calibrate: row 1: model is -1; give a name"):
        calibrate([ROW, {**ROW, "model": -1}], "8xH100")
    near, far = (measured_row({**ROW, "step_s": seconds}) for seconds in (3.0, 30.0))
    told = fit_text([near, far], load_cluster("8xH100"), Coefficients())
    assert "row 1 (from 0): more than 30 % off after the fit too" in told
    assert "(from 0)" not in fit_text([near], load_cluster("8xH100"), Coefficients())


def test_a_row_that_is_no_mapping():
    with pytest.raises(LockstepError, match="row 0 is 3, expected a mapping"):
        calibrate([3])


@pytest.mark.parametrize("value", ["0", "-1", ".nan", ".inf"])
def test_factors_that_are_none(tmp_path, value):
    (tmp_path / "c.yaml").write_text(f"coefficients: 1\nfactors: {{matrix: {value}}}\nlayers: []\n")
    with pytest.raises(LockstepError, match=r"c\.yaml: factors\.matrix is .*; give a finite number above 0"):
        load_coefficients(tmp_path / "c.yaml")


def test_file_round_trip(tmp_path):
    factors = calibrate(runs(Coefficients(matrix=0.9)), CLUSTER)
    save_coefficients(factors, tmp_path / "c.yaml")
    assert load_coefficients(tmp_path / "c.yaml") == factors


EMPTY = "coefficients: 1\nfactors: {}\nlayers"
SHAPE = "[64, 4, 256, 0, 32, 1, 1, 1, 1, 0, 0]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("factors: 3", "expected `coefficients: 1` in it"),
        ("[1]", r"c\.yaml is \[1\], expected a mapping"),
        ("coefficients: 1\nfactors: 0\nlayers: []", "factors is 0, expected a mapping"),
        ("coefficients: 1\nfactors: {matrx: 1}\nlayers: []", "unknown key 'matrx': the nearest is 'matrix'"),
        ("coefficients: 1\nfactors: {matrix: fast}\nlayers: []", "factors.matrix is 'fast'; give a finite number"),
        ("coefficients: 1\nfactors: {}\nlayers: 5", "layers is 5; give a list"),
        ("coefficients: 1\nfactors: {}\nlayers: [5]", "layers, number 0 is 5, expected a mapping"),
        (f"{EMPTY}: [{{shape: {SHAPE.replace('64', '.inf')}, factor: 1}}]", "hidden is inf; give a whole number"),
        (f"{EMPTY}: [{{shape: {SHAPE}, factor: -1}}]", "factor is -1; give a finite number"),
        (f"{EMPTY}: [{{shape: {SHAPE}}}]", "factor is None; give a finite number"),
        (f"{EMPTY}: [{{shape: [1, 2], factor: 1}}]", r"shape is \[1, 2\]; give 11 numbers: hidden, heads"),
        (f"{EMPTY.replace('1', 'true')}: []", "expected `coefficients: 1` in it"),
        ("coefficients: 1\nfactors: {}\nlayer: []", "unknown key 'layer': the nearest is 'layers'"),
    ],
)
def test_no_coefficients_file(text, message, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(LockstepError, match=message):
        load_coefficients(tmp_path / "c.yaml")
