"""A simulation as a picture: an interactive page, lines for a terminal, a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from math import inf, nextafter
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import LockstepError
from lockstep.given import instance, number, whole
from lockstep.parallel.schedules import messages
from lockstep.plan.simulate import Simulation
from lockstep.plan.timeline_page import PAGE
from lockstep.plan.yaml_file import check_can_write


def timeline_html(
    simulation: Simulation,
    title: str | None = None,
    unit: str = "",
    memory_unit: str = "",
    held: str = "activations",
    facts: Mapping[str, str] | None = None,
) -> str:
    """A page with one lane per device and what it holds below: drag to pan, wheel to zoom, hover for a step.

    It loads nothing from the network. ``unit``: of time, ``memory_unit``: of what is held, ``held``: what that is, for
    the labels. ``facts``: names and values for the page's head instead of the simulation's own.
    """
    instance(simulation, Simulation, "timeline: simulation")
    title = simulation.table.name if title is None else title
    _check_words(title=title, unit=unit, memory_unit=memory_unit, held=held)
    data = json.dumps(_page_data(simulation, unit, memory_unit, held), separators=(",", ":")).replace("</", "<\\/")
    facts = (
        _facts(simulation, unit, memory_unit, held) if facts is None else instance(facts, Mapping, "timeline: facts")
    )
    said = "".join(f"<span>{escape(str(key))} <b>{escape(str(value))}</b></span>" for key, value in facts.items())
    page = PAGE.replace("@TITLE@", escape(title)).replace("@DATA@", data)
    return page.replace("@FACTS@", said).replace("@HELD@", escape(held))


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
    simulation: Simulation,
    path: str | Path,
    title: str | None = None,
    unit: str = "",
    seconds_per_unit: float = 1e-3,
    held: str = "activations",
) -> None:
    """Writes the page, or, if the name ends in ``.json``, the trace. ``held``: as in `timeline_html`.

    Raises LockstepError where that cannot be written."""
    if not isinstance(path, (str, Path)):
        raise LockstepError(f"save_timeline: path is {path!r:.60}; give the path of an .html or .json file.")
    check_can_write(path := Path(path), "path")
    if path.suffix == ".json":
        text = json.dumps(trace(simulation, seconds_per_unit, held))
    else:
        text = timeline_html(simulation, title, unit, held=held)
    path.write_text(text, encoding="utf-8")


def trace(simulation: Simulation, seconds_per_unit: float = 1e-3, held: str = "activations") -> dict[str, Any]:
    """The Trace Event Format: a process per device, its steps, what it holds as a counter, messages as arrows.

    ``seconds_per_unit``: of the simulation's times; the trace counts microseconds. ``held``: as in `timeline_html`.
    Processes and threads count from 1: viewers take 0 for the idle one.
    """
    instance(simulation, Simulation, "timeline: simulation")
    _check_words(held=held)
    scale = number(seconds_per_unit, "timeline: seconds_per_unit", above=True) * 1e9
    events: list[dict[str, Any]] = []
    for device in range(simulation.table.stages):
        about = {"process_name": {"name": f"device {device}"}, "process_sort_index": {"sort_index": device}}
        about["thread_name"] = {"name": "steps"}
        events += [{"ph": "M", "name": name, **_place(device, 0), "args": args} for name, args in about.items()]
        events += _steps(simulation, device, scale, held)
    return {"traceEvents": events + _arrows(simulation, scale), "displayTimeUnit": "ms"}


def _check_words(**given: Any) -> None:
    """Raise LockstepError for what is no text."""
    for name, value in given.items():
        instance(value, str, f"timeline: {name}")


def _place(device: int, nanoseconds: int) -> dict[str, Any]:
    return {"pid": device + 1, "tid": device + 1, "ts": _microseconds(nanoseconds)}


def _microseconds(nanoseconds: int) -> int | float:
    """As a trace writes it. A viewer cuts it to whole nanoseconds, so it must not be the least bit less: a step would
    end after its neighbour begins, and be dropped."""
    whole_ones, rest = divmod(nanoseconds, 1000)
    if not rest:
        return whole_ones
    found = nanoseconds / 1000
    return found if found * 1000 >= nanoseconds else nextafter(found, inf)


def _steps(simulation: Simulation, device: int, scale: float, name: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    held, end = simulation.held[device], 0
    for index, step in enumerate(simulation.table.rows[device]):
        at, end = (round(float(times[device][index]) * scale) for times in (simulation.start, simulation.end))
        about = {"kind": step.kind, "micro_batch": step.micro_batch, "chunk": step.chunk}
        took = {"dur": _microseconds(end - at)}
        events.append({"ph": "X", "name": str(step), "cat": step.kind, **_place(device, at), **took, "args": about})
        events.append(_counter(device, at, name, float(held[index])))
    # All activations have gone in the end; weights and what else a device holds have not.
    return [*events, _counter(device, end, name, 0.0)] if name == "activations" else events


def _counter(device: int, at: int, name: str, held: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, **_place(device, at), "args": {"held": held}}


def _arrows(simulation: Simulation, scale: float) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    every = (message for channel in messages(simulation.table).values() for message in channel)
    for count, m in enumerate(every):
        name = {"name": "activation" if m.forward else "gradient", "cat": "message", "id": count}
        # An arrow binds to the slice that encloses its time stamp, so it starts inside the sending step.
        sent = (simulation.start[m.sender][m.after] + simulation.end[m.sender][m.after]) / 2
        used = simulation.start[m.receiver][m.before]
        events.append({"ph": "s", **name, **_place(m.sender, round(float(sent) * scale))})
        events.append({"ph": "f", "bp": "e", **name, **_place(m.receiver, round(float(used) * scale))})
    return events


def _page_data(simulation: Simulation, unit: str, memory_unit: str, held: str) -> dict[str, Any]:
    lanes = []
    for device, row in enumerate(simulation.table.rows):
        columns = (simulation.start[device], simulation.end[device], simulation.held[device])
        numbers = zip(*(column.tolist() for column in columns), strict=True)
        lanes.append([[str(s), s.kind, s.chunk, *map(_short, n)] for s, n in zip(row, numbers, strict=True)])
    units = {"unit": unit, "memory": memory_unit, "held": held}
    return {"lanes": lanes, "span": simulation.makespan, "peak": simulation.peak_activation, **units}


def _short(number: float) -> float:
    """Seven digits: enough to place a pixel, and a quarter of the page's size."""
    return float(f"{number:.7g}")


def _facts(simulation: Simulation, unit: str, memory_unit: str, held: str) -> dict[str, str]:
    table = simulation.table
    return {
        "stages": f"{table.stages} of {table.chunks} chunks each" if table.chunks > 1 else str(table.stages),
        "micro-batches": str(table.micro_batches),
        "makespan": f"{simulation.makespan:.4g} {unit}",
        "longest span of a device": f"{simulation.max_span:.4g} {unit}",
        "bubble, of that span": f"{100 * simulation.bubble_rate:.1f} %",
        f"peak {held}": f"{simulation.peak_activation:.4g} {memory_unit}",
    }
