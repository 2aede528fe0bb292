"""A simulation as a picture: an interactive page, lines for a terminal, a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.given import instance, number, whole
from lockstep.parallel.schedules import messages
from lockstep.plan.simulate import Simulation
from lockstep.plan.timeline_page import PAGE


def timeline_html(simulation: Simulation, title: str | None = None, unit: str = "", memory_unit: str = "") -> str:
    """A page with one lane per device and its activations below: drag to pan, wheel to zoom, hover for a step.

    It loads nothing from the network. ``unit``: of time, ``memory_unit``: of activations, for the labels.
    """
    instance(simulation, Simulation, "timeline: simulation")
    title = title or simulation.table.name
    data = json.dumps(_page_data(simulation, unit), separators=(",", ":")).replace("</", "<\\/")
    page = PAGE.replace("@TITLE@", escape(title)).replace("@DATA@", data)
    return page.replace("@FACTS@", _facts(simulation, unit, memory_unit))


def timeline_text(simulation: Simulation, columns: int = 100) -> str:
    """A picture for a terminal: a line per device; F, B and W at work (a full backward is B), dots for idle time."""
    instance(simulation, Simulation, "timeline: simulation")
    step, lines = simulation.makespan / whole(columns, "timeline: columns", most=10_000), []
    for device, row in enumerate(simulation.table.rows):
        start, end = simulation.start[device], simulation.end[device]
        at = np.searchsorted(end, (np.arange(columns) + 0.5) * step, side="right")  # the step that ends next
        begun = [i < len(row) and start[i] <= (column + 0.5) * step for column, i in enumerate(at)]
        cells = [row[i].kind[0] if busy else "." for i, busy in zip(at, begun, strict=True)]
        lines.append(f"{device:>3} {''.join(cells)}")
    return "\n".join(lines)


def save_timeline(
    simulation: Simulation, path: str | Path, title: str | None = None, unit: str = "", seconds_per_unit: float = 1e-3
) -> None:
    """Writes the page, or, if the name ends in ``.json``, the trace."""
    path = Path(path)
    as_trace = path.suffix == ".json"
    path.write_text(
        json.dumps(trace(simulation, seconds_per_unit)) if as_trace else timeline_html(simulation, title, unit)
    )


def trace(simulation: Simulation, seconds_per_unit: float = 1e-3) -> dict[str, Any]:
    """The Trace Event Format: a process per device, its steps, its activations as a counter, messages as arrows.

    ``seconds_per_unit``: of the simulation's times; the trace counts microseconds.
    """
    instance(simulation, Simulation, "timeline: simulation")
    scale = number(seconds_per_unit, "timeline: seconds_per_unit", above=True) * 1e6
    events: list[dict[str, Any]] = []
    for device in range(simulation.table.stages):
        events.append(
            {"ph": "M", "name": "process_name", "pid": device, "tid": 0, "args": {"name": f"device {device}"}}
        )
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": device, "tid": 0, "args": {"sort_index": device}}
        )
        events += _steps(simulation, device, scale)
    return {"traceEvents": events + _arrows(simulation, scale), "displayTimeUnit": "ms"}


def _steps(simulation: Simulation, device: int, scale: float) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    held = simulation.held[device]
    for index, step in enumerate(simulation.table.rows[device]):
        at, end = simulation.start[device][index] * scale, simulation.end[device][index] * scale
        about = {"kind": step.kind, "micro_batch": step.micro_batch, "chunk": step.chunk}
        place = {"pid": device, "tid": 0, "ts": at}
        events.append({"ph": "X", "name": str(step), "cat": step.kind, **place, "dur": end - at, "args": about})
        events.append({"ph": "C", "name": "activations", **place, "args": {"held": float(held[index])}})
    return events


def _arrows(simulation: Simulation, scale: float) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    every = (message for channel in messages(simulation.table).values() for message in channel)
    for count, m in enumerate(every):
        name = {"name": "activation" if m.forward else "gradient", "cat": "message", "id": count, "tid": 0}
        # An arrow binds to the slice that encloses its time stamp, so it starts inside the sending step.
        sent = (simulation.start[m.sender][m.after] + simulation.end[m.sender][m.after]) / 2
        used = simulation.start[m.receiver][m.before]
        events.append({"ph": "s", **name, "pid": m.sender, "ts": float(sent) * scale})
        events.append({"ph": "f", "bp": "e", **name, "pid": m.receiver, "ts": float(used) * scale})
    return events


def _page_data(simulation: Simulation, unit: str) -> dict[str, Any]:
    lanes = []
    for device, row in enumerate(simulation.table.rows):
        columns = (simulation.start[device], simulation.end[device], simulation.held[device])
        numbers = zip(*(column.tolist() for column in columns), strict=True)
        lanes.append([[str(s), s.kind, s.chunk, *map(_short, n)] for s, n in zip(row, numbers, strict=True)])
    return {"lanes": lanes, "span": simulation.makespan, "peak": simulation.peak_activation, "unit": unit}


def _short(number: float) -> float:
    """Seven digits: enough to place a pixel, and a quarter of the page's size."""
    return float(f"{number:.7g}")


def _facts(simulation: Simulation, unit: str, memory_unit: str) -> str:
    table = simulation.table
    facts = {
        "devices": f"{table.stages} x {table.chunks}" if table.chunks > 1 else str(table.stages),
        "micro-batches": str(table.micro_batches),
        "makespan": f"{simulation.makespan:.6g} {unit}",
        "longest span": f"{simulation.max_span:.6g} {unit}",
        "bubble": f"{simulation.bubble_rate:.2%}",
        "peak activations": f"{simulation.peak_activation:.4g} {memory_unit}",
    }
    return "".join(f"<span>{escape(key)} <b>{escape(value)}</b></span>" for key, value in facts.items())
