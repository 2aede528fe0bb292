"""Every schedule against the published or re-derived numbers in tests/oracles."""

import csv
import shutil
from pathlib import Path

import pytest

from lockstep.plan import StageTimes, schedule, simulate
from lockstep.plan.published_schedules import schedule_lines

ORACLES = Path(__file__).parents[1] / "oracles"
UNIT = StageTimes(1, 1, 1)


def rows(name: str) -> list[dict[str, str]]:
    with (ORACLES / name).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", rows("schedules_unit.csv"), ids=lambda r: f"{r['schedule']}-p{r['p']}-m{r['m']}")
def test_unit_times(row):
    name, p, m = row["schedule"], int(row["p"]), int(row["m"])
    chunks = int(name.partition("v=")[2] or 1)
    table = schedule("interleaved", p, m, chunks=chunks) if chunks > 1 else schedule(name.lower(), p, m)
    got = simulate(table, StageTimes(1 / chunks, 1 / chunks, 1 / chunks))
    # Thirds do not occur: v is 2 or 4, so every time is a sum of powers of two and equality is exact.
    assert (got.max_span, got.makespan) == (float(row["max_span"]), float(row["makespan"]))
    assert got.peak_activation == float(row["peak_activation"])


@pytest.mark.parametrize("row", rows("schedules_profiled.csv"), ids=lambda r: f"{r['model']}-m{r['m']}")
def test_profiled_times(row):
    p, m, comm = int(row["p"]), int(row["m"]), float(row["Tcomm"])
    times = StageTimes(float(row["TF"]), float(row["TB"]), float(row["TW"]))
    for name in ("1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p"):
        got = simulate(schedule(name, p, m, times, comm), times, comm, m_w=0.5)
        published = float(
            row["b_" + name.replace("-", "").replace("1f1b", "1F1B").replace("zb", "ZB").replace("h", "H")]
        )
        assert round(got.bubble_rate, 4) == published, name
        if name in ("zb-1p", "zb-2p"):
            assert got.peak_activation <= p * int(name[3])


@pytest.mark.parametrize("row", rows("schedules_profiled.csv"), ids=lambda r: f"{r['model']}-m{r['m']}")
def test_profiled_interleaved_within_the_latency_of_one_trip(row):
    p, m, v, comm = int(row["p"]), int(row["m"]), int(row["v_1F1BI"]), float(row["Tcomm"])
    times = StageTimes(float(row["TF"]) / v, float(row["TB"]) / v, float(row["TW"]) / v)
    got = simulate(schedule("interleaved", p, m, chunks=v), times, comm)
    # The published rate has four digits: half of the last one is this much time.
    rounding = 0.00005 * got.max_span / (1 - got.bubble_rate)
    published = got.ideal / (1 - float(row["b_1F1BI"]))
    assert abs(got.max_span - published) <= p * comm + rounding


@pytest.mark.parametrize("row", rows("schedules_unequal_times.csv"), ids=lambda r: f"{r['F,B,W']}-p{r['p']}")
def test_unequal_times(row):
    times, p, m = StageTimes(*map(float, row["F,B,W"].split(","))), int(row["p"]), int(row["m"])
    for name in ("1F1B", "ZB-H1", "ZB-H2", "ZB-V", "V-Half", "V-Min"):
        got = simulate(schedule(name.lower(), p, m, times), times)
        assert round(got.bubble_rate, 4) == float(row[name]), name


@pytest.mark.parametrize("row", rows("v_schedules.csv"), ids=lambda r: f"{r['schedule']}-p{r['p']}")
def test_v_schedules(row):
    name, p = row["schedule"].lower(), int(row["p"])
    for m in (2 * p, 2 * p + 3):
        got = simulate(schedule(name, p, m), UNIT)
        # A chunk is half a device; 1F1B has whole devices, so its step of 1 is two units.
        assert got.bubble * (2 if name == "1f1b" else 1) == float(row["bubble_units"])
        assert got.peak_activation == float(row["peak_activation_full_stage"])


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_dualpipe_v_meets_its_closed_form(p):
    for times in (UNIT, StageTimes(1, 1, 0.5)):
        got = simulate(schedule("dualpipe-v", p, 2 * p + 1), times)
        full = times.b + times.w
        assert got.bubble == (p - 1) * ((times.f + full) + full - 3 * times.w)
        assert got.peak_activation == p + 0.5


def test_overlap_shortens_dualpipe_v():
    plain = simulate(schedule("dualpipe-v", 4, 12), UNIT)
    overlapped = simulate(schedule("dualpipe-v", 4, 12), StageTimes(1, 1, 1, overlapped=0.8))
    assert overlapped.makespan < plain.makespan


@pytest.mark.parametrize("p", [2, 5])
def test_closed_forms(p):
    f, b, w, m = 3.0, 4.0, 2.0, 4 * p
    times = StageTimes(f, b, w)
    bubbles = {"gpipe": f + b + w, "1f1b": f + b + w, "zb-h1": f + b - w, "zb-h2": f + b - 2 * w}
    for name, per_device in bubbles.items():
        assert simulate(schedule(name, p, m), times).bubble == (p - 1) * per_device, name
    chunked = simulate(schedule("interleaved", p, m, chunks=2), StageTimes(f / 2, b / 2, w / 2))
    assert chunked.bubble == (p - 1) * (f + b + w) / 2


@pytest.mark.parametrize("p", [5, 7, 10, 11, 13])
def test_controllable_memory_peaks(p):
    for name, peak in (("zb-v", p), ("v-half", (p + 2) // 2), ("v-min", (p + 4) // 3)):
        got = [simulate(schedule(name, p, m), UNIT) for m in (2 * p, 3 * p)]
        assert [run.peak_activation for run in got] == [peak, peak]
        assert got[0].bubble == got[1].bubble, "independent of m from 2p on"


def test_lines_of_the_bench_command(tmp_path):
    """On the smaller rows: the tests above have them all."""
    for name in ("schedules_unit", "schedules_profiled", "schedules_unequal_times", "v_schedules"):
        head, *body = (ORACLES / f"{name}.csv").read_text().splitlines()
        column = head.replace('"F,B,W"', "times,,").split(",").index("p")
        small = [line for line in body if int(line.replace('"', "").split(",")[column]) <= 8][:3]
        (tmp_path / f"{name}.csv").write_text("\n".join([head, *small]))
    shutil.copy(ORACLES / "balance_golden.json", tmp_path)
    lines = schedule_lines(tmp_path)
    assert len(lines) == 7
    for line in lines:
        if line.measure != "seconds":  # a busy machine is no error
            assert line.error <= line.target, line
    text = (tmp_path / "schedules_unit.csv").read_text().replace("GPipe,9,", "GPipe,8,")
    (tmp_path / "schedules_unit.csv").write_text(text)
    assert schedule_lines(tmp_path)[0].error == 1.0
