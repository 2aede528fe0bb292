"""The report page: its frontier, and a pipeline whose picture is the simulation of the plan."""

import re

import numpy as np
import pytest

from lockstep.plan import Batch, Coefficients, Layout, load_cluster, model_shape, predict, rank_memory, search
from lockstep.plan.per_stage import plan_simulation
from lockstep.plan.report import report
from lockstep.plan.report_page import pareto, save_report


def test_pareto():
    memory, seconds = np.array([5.0, 4, 6, 1, 4]), np.array([1.0, 2, 1.5, 9, 3])
    assert pareto(memory, seconds) == [0, 1, 3]


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(tp=2), "tp2 mb1 recompute none"),
        (Layout(dp=2, recompute_layers=3), "dp2 mb1 recompute 3 layers"),
        (Layout(pp=2, recompute_per_stage=(2, 0), offload_per_stage=(0, 1)),
         "pp2 mb1 1f1b recompute 2/0 layers offload 0/1 layers"),
        (Layout(recompute="selective", recompute_layers=1), "mb1 recompute selective + 1 layers"),
        (Layout(recompute="full", fsdp=3), "mb1 fsdp3 recompute full"),
    ],
)  # fmt: skip
def test_a_layout_in_words(layout, text):
    assert layout.describe() == text


def test_picture_is_the_plan():
    shape, cluster, batch = model_shape("llama3-8b"), load_cluster("8xH100"), Batch(32, 2048)
    layout = Layout(pp=4, tp=2, schedule="1f1b")
    run = plan_simulation(shape, layout, batch, cluster, Coefficients())
    found = predict(shape, layout, cluster, batch)
    # Micro-batches are cut to those that show the steady state: 12 of 32.
    assert run.table.micro_batches == 12
    assert run.makespan == pytest.approx(found.step_s * 15 / 35, rel=0.15)  # (m + p - 1) micro-batches of time
    # Memory is all that a rank holds at each step, with as many micro-batches as are drawn.
    drawn = Batch(12, 2048)
    for stage in range(4):
        found = rank_memory(shape, layout, drawn, 2 * stage)
        assert run.held[stage].tolist() == [found.at(i) / 1e9 for i in range(len(found.steps))]


def test_page_escapes_what_it_shows(tmp_path):
    shape = model_shape({"name": "<script>x", "layers": 4, "hidden": 64, "heads": 4, "vocab": 100})
    plans = search(shape, "4xH100", seq=128, global_batch_tokens=1 << 12)
    save_report(plans, "4xH100", tmp_path / "r.html")
    assert "<script>x" not in (tmp_path / "r.html").read_text().split("<iframe")[0]


def test_a_part_has_one_colour_in_every_plan_and_the_legend(tmp_path):
    plans = search("llama3-8b", "8xA100-40", seq=2048, global_batch_tokens=1 << 18)
    save_report(plans, "8xA100-40", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text().split("<iframe")[0]
    bars = re.findall(r'<i title="([a-z ]+): [^"]*" style="width:[0-9.]+%;background:(hsl[^"]+)"', page)
    keys = re.findall(r'<span><i style="background:(hsl[^"]+)"></i>([a-z ]+)</span>', page)
    assert len(bars) > 2 * len(plans)
    assert {(name, colour) for name, colour in bars} <= {(name, colour) for colour, name in keys}


def test_text_names_the_parts():
    plans = search("llama3-70b", "128xH100", seq=8192, global_batch_tokens=1 << 20, pins={"pp": 4})
    text = report(plans, "128xH100")
    assert "70.55 B parameters on 128xH100" in text
    assert "compute" in text
    assert "activations" in text
    assert "bubble" in text
