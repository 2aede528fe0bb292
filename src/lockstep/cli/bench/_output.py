"""What benches share: options, and what each does with its report: print it, keep its numbers, write its section."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lockstep.bench import Report

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Keep the numbers in this file.")]
Document = Annotated[
    Path | None,
    typer.Option("--write", metavar="FILE", help="Write the section of this document, such as docs/performance.md."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny sizes and few rounds: whether it runs, not how fast.")]


def publish(report: Report, json_file: Path | None, document: Path | None) -> None:
    """Print the table; keep the JSON and the section where files are named."""
    from rich.console import Console
    from rich.table import Table

    from lockstep.bench import write_section

    table = Table(title=report.title, title_justify="left")
    for i, column in enumerate(report.columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    for row in report.rows:
        table.add_row(*row)
    console = Console()
    # In a pipe the width is unknown, and 80 columns would cut cells in two.
    console = console if console.is_terminal else Console(width=160)
    console.print(table)
    console.print(report.machine.line(), style="dim", highlight=False)
    for note in report.notes:
        console.print(f"- {note}", highlight=False)
    if json_file is not None:
        json_file.write_text(report.json(), encoding="utf-8")
    if document is not None:
        write_section(document, report.name, report.markdown())
        console.print(f"wrote the section {report.name!r} of {document}", highlight=False)
