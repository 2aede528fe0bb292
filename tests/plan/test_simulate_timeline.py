"""The timeline page and the trace of a simulation."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import LockstepError
from lockstep.parallel.schedules import NAMES
from lockstep.plan import StageTimes, save_timeline, schedule, simulate, timeline_html, timeline_text, trace

TIMES = StageTimes(3.0, 4.0, 2.0)


@pytest.fixture(scope="module")
def simulation():
    return simulate(schedule("zb-v", 4, 8, TIMES, 0.5), TIMES, 0.5)


def test_page_is_self_contained_and_holds_every_step(simulation):
    page = timeline_html(simulation, title="<plan> & co", unit="ms")
    assert not re.search(r"(src|href)\s*=|https?://|@import|fetch\(", page)
    assert "<title>&lt;plan&gt; &amp; co</title>" in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert [[step[0] for step in lane] for lane in data["lanes"]] == [list(map(str, r)) for r in simulation.table.rows]
    assert data["span"] == simulation.makespan
    assert max(step[5] for lane in data["lanes"] for step in lane) == simulation.peak_activation


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the page's script")
def test_page_draws_pans_zooms_and_tells_what_is_under_the_pointer(simulation, tmp_path):
    save_timeline(simulation, tmp_path / "timeline.html", unit="ms")
    stub = Path(__file__).with_name("timeline_stub.js")
    done = subprocess.run(["node", stub, tmp_path / "timeline.html"], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    whole, tip, zoomed, panned, closer, reset = said["seen"]
    assert whole == reset == [0, simulation.makespan]
    assert tip.startswith("device 0: F0 (forward)\nstart 0 ms, end 3 ms")
    assert zoomed[1] - zoomed[0] < whole[1] - whole[0]
    assert panned[0] > zoomed[0]
    assert panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0])
    assert closer[1] - closer[0] == pytest.approx(0.7 * (panned[1] - panned[0]))
    assert said["drawn"] > 3 * 8 * 8


def test_a_timeline_that_cannot_be_written_is_told(simulation, tmp_path):
    for place, why in ((tmp_path / "none" / "t.html", "there is no directory"), (tmp_path, "it is a directory")):
        with pytest.raises(LockstepError, match=f"cannot write {place}: {why}.*Choose another path"):
            save_timeline(simulation, place)
    with pytest.raises(LockstepError, match="path is 3; give the path"):
        save_timeline(simulation, 3)


def test_trace_holds_steps_memory_and_messages(simulation, tmp_path):
    save_timeline(simulation, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [e for e in events if e["ph"] == "X"]
    assert len(steps) == len(simulation.events) == 4 * 2 * 8 * 3
    # Times are in ms unless told otherwise; a trace is in microseconds.
    assert max(e["ts"] + e["dur"] for e in steps) == pytest.approx(1000 * simulation.makespan)
    assert max(e["args"]["held"] for e in events if e["ph"] == "C") == simulation.peak_activation
    sent, used = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    # Per micro-batch: 7 boundaries between 8 groups, one of them inside device 3, forward and backward.
    assert sent.keys() == used.keys()
    assert len(sent) == 8 * 6 * 2
    assert all(sent[i]["ts"] < used[i]["ts"] and sent[i]["pid"] != used[i]["pid"] for i in sent)


@settings(max_examples=30, deadline=None)
@given(times=st.tuples(*[st.floats(1e-7, 3.0)] * 3), comm=st.floats(0, 0.1), name=st.sampled_from(NAMES))
def test_trace_is_one_that_viewers_take(times, comm, name):
    """The rules of the Trace Event Format, as a viewer that counts whole nanoseconds reads the numbers."""
    run = simulate(
        schedule(name, 3, 7, comm=comm, chunks=2 if name == "interleaved" else None), StageTimes(*times), comm
    )
    content = json.loads(json.dumps(trace(run, seconds_per_unit=1.0)))
    events, last, counted = content["traceEvents"], {}, {}
    assert {e["ph"] for e in events} <= set("MXCsf")
    names = {(e["pid"], e["tid"]): e["args"] for e in events if e["name"] == "thread_name"}
    arrows = {ph: [(e["cat"], e["name"], e["id"]) for e in events if e["ph"] == ph] for ph in "sf"}
    assert sorted(arrows["s"]) == sorted(arrows["f"]), "every arrow has one beginning and one end"
    assert len(set(arrows["s"])) == len(arrows["s"])
    slices = {}
    for event in events:
        assert event["pid"] > 0 < event["tid"]
        assert (event["pid"], event["tid"]) in names
        at = int(event["ts"] * 1000)
        assert at >= 0
        if event["ph"] == "X":
            took = int(event["dur"] * 1000)
            assert took >= 0
            assert at >= last.get(event["pid"], 0), "steps of a device come one after the other"
            last[event["pid"]] = at + took
            slices.setdefault(event["pid"], []).append((at, at + took))
        if event["ph"] == "C":
            assert at >= counted.get(event["pid"], (0, 0))[0]
            counted[event["pid"]] = (at, event["args"]["held"])
    assert {pid: (last[pid], 0.0) for pid in last} == counted, "at the end nothing is held"
    for event in (e for e in events if e["ph"] in "sf"):
        at = int(event["ts"] * 1000)
        assert any(begin <= at <= end for begin, end in slices[event["pid"]]), "an arrow binds to a step"


def test_trace_unit(simulation):
    in_seconds = trace(simulation, seconds_per_unit=1.0)["traceEvents"]
    last = max(e["ts"] + e["dur"] for e in in_seconds if e["ph"] == "X")
    assert last == pytest.approx(1e6 * simulation.makespan)


def test_text_of_a_terminal():
    run = simulate(schedule("zb-h1", 2, 2), StageTimes(1, 1, 1))
    assert timeline_text(run, columns=7) == "  0 FF.BWBW\n  1 .FBFBWW"
    assert len(timeline_text(run, columns=40).splitlines()[0]) == 44
