"""The report page: its frontier, and a pipeline whose picture is the simulation of the plan."""

import html
import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from tests import chromium
from tests.chromium import browser as browser

from lockstep.plan import Batch, Coefficients, Layout, load_cluster, model_shape, predict, search
from lockstep.plan.frontier import pareto, ticks
from lockstep.plan.per_stage import plan_simulation, stage_memory
from lockstep.plan.report import report, tight
from lockstep.plan.report_page import COLOURS, save_report


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
        (Layout(recompute="selective", recompute_layers=1), "mb1 recompute selective + 1 layer"),
        (Layout(offload_layers=1), "mb1 recompute none offload 1 layer"),
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
        found = stage_memory(shape, layout, drawn, stage, batch)
        assert run.held[stage].tolist() == [found.at(i) / 1e9 for i in range(len(found.steps))]


def test_page_escapes_what_it_shows(tmp_path):
    shape = model_shape({"name": "<script>x", "layers": 4, "hidden": 64, "heads": 4, "vocab": 100})
    plans = search(shape, "4xH100", seq=128, global_batch_tokens=1 << 12)
    save_report(plans, "4xH100", tmp_path / "r.html")
    assert "<script>x" not in (tmp_path / "r.html").read_text().split("<iframe")[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Plans of which the best is all but full, and their page."""
    file = tmp_path_factory.mktemp("report") / "r.html"
    plans = search("llama3-8b", "8xA100-40", seq=2048, global_batch_tokens=1 << 18, pins={"pp": 4})
    save_report(plans, "8xA100-40", file, pins={"pp": 4})
    return plans, file


def test_a_part_has_one_colour_in_every_plan_and_the_legend(written):
    plans, file = written
    page = file.read_text().split("<iframe")[0]
    bars = re.findall(r'<i title="([a-z ]+): [^"]*" style="width:[0-9.]+%;background:(#[^"]+)"', page)
    keys = re.findall(r'<span><i style="background:(#[^"]+)"></i>([a-z ]+)</span>', page)
    assert len(bars) > 2 * len(plans)
    assert {(name, colour) for name, colour in bars} <= {(name, colour) for colour, name in keys}


def _far(one: str, other: str) -> float:
    """How different two colours look, 0 to about 760 (https://www.compuphase.com/cmetric.htm)."""
    (r, g, b), (s, h, c) = ([int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in (one, other))
    red = (r + s) / 2
    return math.sqrt((2 + red / 256) * (r - s) ** 2 + 4 * (g - h) ** 2 + (2 + (255 - red) / 256) * (b - c) ** 2)


def test_parts_of_one_bar_are_told_apart(written):
    its = written[0][0].prediction
    for parts in (its.parts, its.memory_parts):
        for one, other in itertools.combinations(parts, 2):
            assert _far(COLOURS[one], COLOURS[other]) > 100, (one, other)


def test_ticks_are_round_and_inside():
    assert ticks(32.3, 146, 8) == [40, 60, 80, 100, 120, 140]
    assert ticks(0, 165, 6) == [0, 50, 100, 150]
    assert ticks(0.0101, 0.0102, 4) == [0.0101, 0.01015, 0.0102]


@chromium.needed
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_as_wide_as_the_window(browser, written, width):
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(written[1].as_uri())
    for frame in page.frames:
        assert frame.evaluate("document.documentElement.scrollWidth") <= width
        assert frame.evaluate("document.documentElement.scrollWidth <= innerWidth")
    # No label of the frontier lies upon another.
    boxes = page.eval_on_selector_all(
        "svg text",
        "all => all.map(t => { const b = t.getBoundingClientRect(); return [b.left, b.right, b.top, b.bottom]; })",
    )
    for (a, b, c, d), (e, f, g, h) in itertools.combinations(boxes, 2):
        assert b <= e or f <= a or d <= g or h <= c
    page.close()


def test_the_picture_tells_the_bubble_of_the_step_alone(written):
    plans, file = written
    inside = html.unescape(re.search(r'srcdoc="([^"]*)"', file.read_text())[1])
    told = dict(re.findall(r"<span>([^<]*) <b>([^<]*)</b></span>", inside.split("<canvas")[0]))
    assert told["bubble of the step"] == f"{100 * plans[0].prediction.bubble:.1f} %"
    assert [name for name in told if "bubble" in name] == ["bubble of the step"]


def test_a_full_best_plan_is_told_with_pins_that_leave_more(written):
    plans, cluster = written[0], load_cluster("8xA100-40")
    room = cluster.device.capacity / 1e9
    tightest = max(plans, key=lambda plan: plan.prediction.memory_gb)
    roomy = next(plan for plan in plans if plan.prediction.memory_gb < 0.95 * room)
    full = replace(tightest, prediction=replace(tightest.prediction, memory_gb=0.996 * room))
    assert tight([roomy], cluster) == []
    assert "--pin" in tight([full], cluster)[0]
    [said] = tight([full, roomy], cluster)
    assert f"leaves {0.004 * room:.1f} of {room:.1f} GB (0.4 %) free" in said
    pins = dict(pin.split("=") for pin in re.findall(r"--pin (\S+)", said))
    again = search("llama3-8b", "8xA100-40", seq=2048, global_batch_tokens=1 << 18, pins=pins)
    assert replace(again[0].layout, bucket_mb=0, gradient_groups=0) == replace(
        roomy.layout, bucket_mb=0, gradient_groups=0
    )


def test_text_names_the_parts():
    plans = search("llama3-70b", "128xH100", seq=8192, global_batch_tokens=1 << 20, pins={"pp": 4})
    text = report(plans, "128xH100")
    assert "70.55 B parameters on 128xH100" in text
    assert "compute" in text
    assert "activations" in text
    assert "bubble" in text
