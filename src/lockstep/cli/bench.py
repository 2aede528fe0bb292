"""`lockstep bench`: what is measured or published, against what this copy gives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.errors import LockstepError


def bench(
    what: Annotated[str, typer.Argument(help="plan: the planner's errors against published runs.")],
    oracles: Annotated[Path, typer.Option(help="Folder of the oracle tables.")] = Path("tests/oracles"),
) -> None:
    """Print a table of measured errors or speeds."""
    if what != "plan":
        raise LockstepError(f"bench {what!r} is unknown: known is `lockstep bench plan`.")
    _plan(oracles)


def _plan(oracles: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from lockstep.plan.published import error_table

    console = Console(width=110)
    with console.status("fitting and predicting (about half a minute)"):
        lines = error_table(oracles)
    table = Table("table", "measure", "error", "target", "met")
    for line in lines:
        aim = f"{line.target:g}{line.unit}" if line.target < float("inf") else "-"
        verdict = ("yes" if line.met else "NO") if line.target < float("inf") else "-"
        table.add_row(line.table, line.measure, f"{line.error:.3g}{line.unit}", aim, verdict)
    console.print(table)
