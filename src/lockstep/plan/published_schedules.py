"""How far the simulated schedules and the balance are from published numbers: lines of `lockstep bench plan`."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.parallel.schedules import StageTimes, schedule
from lockstep.plan.balance import balance
from lockstep.plan.simulate import Simulation, simulate

_ONE = StageTimes(1.0, 1.0, 1.0)
_PROFILED = {"1f1b": "1F1B", "zb-h1": "ZBH1", "zb-h2": "ZBH2", "zb-1p": "ZB1p", "zb-2p": "ZB2p"}


class Line(NamedTuple):
    """One line: a file, what was compared, the largest difference found, and the largest allowed."""

    table: str
    measure: str
    error: float
    target: float


def schedule_lines(folder: Path) -> list[Line]:
    """All lines. ``folder`` holds the oracle tables (``tests/oracles`` of the repository)."""
    digits = 0.00005  # of a rate published with four decimals
    return [
        Line("schedules_unit.csv", "largest difference of spans and peaks", max(_unit(folder)), 0.0),
        Line("schedules_profiled.csv", "largest difference of bubble rates", max(_profiled(folder)), digits),
        Line("schedules_profiled.csv", "interleaved: difference / (p x latency)", max(_interleaved(folder)), 1.0),
        Line("schedules_unequal_times.csv", "largest difference of bubble rates", max(_unequal(folder)), digits),
        Line("v_schedules.csv", "largest difference of bubbles and peaks", max(_v_schedules(folder)), 0.0),
        *_balance(folder),
    ]


def _rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / name).open() as file:
        return list(csv.DictReader(file))


def _unit(folder: Path) -> Iterator[float]:
    for row in _rows(folder, "schedules_unit.csv"):
        name, p, m = row["schedule"].lower(), int(row["p"]), int(row["m"])
        v = int(name.partition("v=")[2] or 1)
        table = schedule("interleaved", p, m, chunks=v) if v > 1 else schedule(name, p, m)
        run = simulate(table, StageTimes(1 / v, 1 / v, 1 / v))
        for key in ("max_span", "makespan", "peak_activation"):
            yield abs(getattr(run, key) - float(row[key]))


def _times(row: dict[str, str], chunks: int = 1) -> StageTimes:
    f, b, w = (float(row[key]) / chunks for key in ("TF", "TB", "TW"))
    return StageTimes(f, b, w)


def _profiled(folder: Path) -> Iterator[float]:
    for row in _rows(folder, "schedules_profiled.csv"):
        p, m, comm, times = int(row["p"]), int(row["m"]), float(row["Tcomm"]), _times(row)
        for name, column in _PROFILED.items():
            yield abs(simulate(schedule(name, p, m, times, comm), times, comm).bubble_rate - float(row["b_" + column]))


def _interleaved(folder: Path) -> Iterator[float]:
    """The difference of the iteration's cost, beyond the rounding of the published rate, in units of p x latency."""
    for row in _rows(folder, "schedules_profiled.csv"):
        p, m, v, comm = int(row["p"]), int(row["m"]), int(row["v_1F1BI"]), float(row["Tcomm"])
        run: Simulation = simulate(schedule("interleaved", p, m, chunks=v), _times(row, v), comm)
        published = run.ideal / (1 - float(row["b_1F1BI"]))
        rounding = 0.00005 * published / (1 - float(row["b_1F1BI"]))
        yield max(0.0, abs(run.max_span - published) - rounding) / (p * comm)


def _unequal(folder: Path) -> Iterator[float]:
    for row in _rows(folder, "schedules_unequal_times.csv"):
        times, p, m = StageTimes(*map(float, row["F,B,W"].split(","))), int(row["p"]), int(row["m"])
        for name in ("1F1B", "ZB-H1", "ZB-H2", "ZB-V", "V-Half", "V-Min"):
            yield abs(simulate(schedule(name.lower(), p, m, times), times).bubble_rate - float(row[name]))


def _v_schedules(folder: Path) -> Iterator[float]:
    for row in _rows(folder, "v_schedules.csv"):
        name, p = row["schedule"].lower(), int(row["p"])
        run = simulate(schedule(name, p, 2 * p + 1), _ONE)
        units = 2 if name == "1f1b" else 1  # a chunk is half a device
        yield abs(units * run.bubble - float(row["bubble_units"]))
        yield abs(run.peak_activation - float(row["peak_activation_full_stage"]))


def _balance(folder: Path) -> list[Line]:
    golden = json.loads((folder / "balance_golden.json").read_text())
    begin = time.perf_counter()
    found = balance(golden)
    seconds = time.perf_counter() - begin
    excess = max(0.0, found.makespan - 110_610)
    return [
        Line("balance_golden.json", "makespan beyond 110610", excess, 0.0),
        Line("balance_golden.json", "seconds", seconds, 1.0),
    ]
