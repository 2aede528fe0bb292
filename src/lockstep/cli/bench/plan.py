"""`lockstep bench plan`: the planner's errors against published and measured runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.bench._output import Document, JsonFile, publish
from lockstep.errors import LockstepError


def plan(
    measured: Annotated[
        bool, typer.Option("--measured", help="Instead: layouts on two processes of this machine.")
    ] = False,
    cluster: Annotated[
        Path | None, typer.Option(help="With --measured: what `lockstep doctor --calibrate` wrote.")
    ] = None,
    oracles: Annotated[Path, typer.Option(help="Folder of the oracle tables.")] = Path("tests/oracles"),
    json_file: JsonFile = None,
    write: Document = None,
) -> None:
    """The planner's errors against published and measured runs."""
    if measured:
        return _measured(cluster, json_file, write)
    if cluster is not None:
        raise LockstepError(f"bench plan --cluster {cluster} goes with --measured: add it, or leave out --cluster.")
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
    return None


def _measured(cluster: Path | None, json_file: Path | None, write: Path | None) -> None:
    """Layouts of a small model on two processes: predicted beside measured."""
    import tempfile

    from rich.console import Console

    from lockstep.bench import Report, describe
    from lockstep.plan import load_cluster
    from lockstep.plan.this_machine import calibrate_machine
    from lockstep.train.planned_and_measured import WHAT_IS_MEASURED, compare, mean_error, regret

    with (
        Console(stderr=True).status("measuring this machine and the layouts (minutes)"),
        tempfile.TemporaryDirectory() as folder,
    ):
        file = cluster or Path(folder) / "machine.yaml"
        if cluster is None:
            calibrate_machine(file)
        found = sorted(compare(load_cluster(f"2x{file}")), key=lambda row: row.measured)
    rows = [
        (row.layout.describe(), f"{row.measured:.3f} s", f"{row.predicted:.3f} s", f"{100 * row.error:.1f} %",
         "calibrates" if row.fitted else "")
        for row in found
    ]  # fmt: skip
    error, behind = f"{100 * mean_error(found):.1f} %", f"{100 * regret(found):.1f} %"
    rows.append(("mean error of those that did not calibrate (target 15 %)", "", "", error, ""))
    rows.append(("predicted best behind measured best (target 5 %)", "", "", behind, ""))
    report = Report(
        "plan-measured", "The planner on this machine: layouts on two processes", "lockstep bench plan --measured",
        describe("scipy"), ("layout", "measured", "predicted", "error", ""), tuple(rows), (WHAT_IS_MEASURED,),
        data=[asdict(row) for row in found],
    )  # fmt: skip
    publish(report, json_file, write)
