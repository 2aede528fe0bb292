"""`lockstep bench plan`: the planner's errors against published and measured runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.bench._output import Document, JsonFile, publish


def plan(
    oracles: Annotated[Path, typer.Option(help="Folder of the oracle tables.")] = Path("tests/oracles"),
    json_file: JsonFile = None,
    write: Document = None,
) -> None:
    """The planner's errors against published and measured runs."""
    from rich.console import Console

    from lockstep.bench import Report, describe
    from lockstep.plan.published import error_table

    with Console(stderr=True).status("fitting and predicting (about half a minute)"):
        lines = error_table(oracles)
    rows = []
    for line in lines:
        aim = f"{line.target:g}{line.unit}" if line.target < float("inf") else "-"
        verdict = ("yes" if line.met else "NO") if line.target < float("inf") else "-"
        rows.append((f"{line.table}: {line.measure}", f"{line.error:.3g}{line.unit}", aim, verdict))
    data = [asdict(line) | {"target": line.target if line.target < float("inf") else None} for line in lines]
    report = Report(
        "plan", "The planner against published and measured runs", "lockstep bench plan", describe("scipy"),
        ("measure", "error", "target", "met"), tuple(rows), data=data,
    )  # fmt: skip
    publish(report, json_file, write)
