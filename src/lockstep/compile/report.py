"""The report of a compilation: tables of times and of what each pass did, and the page of the graphs."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import fx

from lockstep.compile.graph_view import save_graph_view, stage_data
from lockstep.compile.passes import PassReport

_WIDTH = 120
"""Columns of the report as text."""
_MOST_NOTES = 12
"""Different notes shown below the table of passes; the page has all of them."""


class Compiled(Protocol):
    """What is told of a compiled stage. seconds: by phase. before, after: its graph without and with the passes."""

    name: str
    cached: bool
    seconds: dict[str, float]
    passes: tuple[PassReport, ...]
    before: fx.GraphModule | None
    after: fx.GraphModule | None


def explained(stages: Sequence[Compiled], seconds: Mapping[str, float], title: str, page: Path | None) -> str:
    """The report as text, and the page written where one is asked for and a graph was kept."""
    console = Console(width=_WIDTH, file=io.StringIO(), record=True)
    console.print(compile_report(stages, seconds), soft_wrap=False)
    if page is not None and save_graphs(page, title, stages):
        console.print(Text(f"The graphs, before and after the passes: {page}"), soft_wrap=True)
    return console.export_text().rstrip()


def compile_report(stages: Sequence[Compiled], seconds: Mapping[str, float]) -> RenderableType:
    """What a console prints. seconds: of the phases that belong to no single stage."""
    parts: list[RenderableType] = [_times(stages, seconds)]
    if any(stage.passes for stage in stages):
        parts += [_passes(stages), *_notes(stages)]
    return Group(*parts)


def save_graphs(path: str | Path, title: str, stages: Sequence[Compiled]) -> bool:
    """Write the page of the stages whose graphs were kept, the largest first; False where there are none and nothing
    is written."""
    data = [
        stage_data(
            f"{stage.name} {i}" if _count(stages, stage.name) > 1 else stage.name,
            stage.before,
            stage.after,
            _forward_outputs(stage.after),
            [f"{report.name}: {note}" for report in stage.passes for note in report.notes],
        )
        for i, stage in enumerate(stages)
        if stage.before is not None and stage.after is not None
    ]
    data.sort(key=lambda one: -len(one["before"]["nodes"]))
    if data:
        save_graph_view(path, title, data)
    return bool(data)


def _times(stages: Sequence[Compiled], seconds: Mapping[str, float]) -> Table:
    phases = list(dict.fromkeys([*(phase for stage in stages for phase in stage.seconds), *seconds]))
    table = Table(title="Compile time, ms", title_justify="left", header_style="bold")
    table.add_column("stage")
    for phase in (*phases, "all"):
        table.add_column(phase, justify="right")
    for stage in stages:
        name = f"{stage.name} (from the cache)" if stage.cached else stage.name
        table.add_row(name, *_cells(stage.seconds, phases))
    table.add_row("whole program", *_cells(seconds, phases), end_section=True)
    total: Counter[str] = Counter(seconds)
    for stage in stages:
        total.update(stage.seconds)
    table.add_row("all", *_cells(total, phases), style="bold")
    return table


def _cells(seconds: Mapping[str, float], phases: Sequence[str]) -> list[str]:
    shown = [f"{1000 * seconds[phase]:,.1f}" if phase in seconds else "" for phase in phases]
    return [*shown, f"{1000 * sum(seconds.values()):,.1f}"]


def _passes(stages: Sequence[Compiled]) -> Table:
    table = Table(title="Passes", title_justify="left", header_style="bold")
    for name, side in (("stage", "left"), ("pass", "left"), ("changed", "right"), ("nodes", "right"), ("ms", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for stage in stages:
        for i, report in enumerate(step for step in stage.passes if step.changed):
            nodes = f"{report.before} -> {report.after}" if report.before != report.after else str(report.after)
            milliseconds = f"{1000 * report.seconds:,.1f}"
            table.add_row("" if i else stage.name, report.name, f"{report.changed:,}", nodes, milliseconds)
        idle = [step for step in stage.passes if not step.changed]
        if idle:
            nodes, milliseconds = str(idle[-1].after), f"{1000 * sum(step.seconds for step in idle):,.1f}"
            first = "" if len(idle) < len(stage.passes) else stage.name
            named = idle[0].name if len(idle) == 1 else f"{len(idle)} others"
            table.add_row(first, named, "0", nodes, milliseconds, style="dim")
        table.add_section()
    return table


def _notes(stages: Sequence[Compiled]) -> list[Text]:
    """The passes' notes, each once with how often it came, the most frequent first."""
    found: Counter[str] = Counter(
        f"{report.name}: {note}" for stage in stages for report in stage.passes for note in report.notes
    )
    shown = [
        Text(f"{note}{f' ({count} times)' if count > 1 else ''}") for note, count in found.most_common(_MOST_NOTES)
    ]
    more = len(found) - len(shown)
    return [*shown, Text(f"and {more} more, on the page")] if more > 0 else shown


def _count(stages: Sequence[Compiled], name: str) -> int:
    return sum(stage.name == name for stage in stages)


def _forward_outputs(module: fx.GraphModule) -> int:
    """How many results are the forward pass's: all of them where there is no backward pass."""
    outputs = module.meta.get("forward_outputs")
    return len(module.graph.output_node().all_input_nodes) if outputs is None else int(outputs)
