"""`lockstep dryrun`: one training step without memory: what it takes, when it takes most, what its operators cost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.imports import heavy_imports
from lockstep.config import load_config
from lockstep.config.compile import Level
from lockstep.errors import LockstepError, NotRunError
from lockstep.plan.planfile import load_plan


def dryrun(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG.yaml|MODEL]", help="A run's YAML, or a name, or config.json."),
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE over the file; repeatable.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan.yaml: its model, its layout, its batch.")] = None,
    rank: Annotated[int, typer.Option(help="Which rank of the mesh.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Go through a training step on the meta device: memory, its peak, FLOPs and bytes per operator."""
    if plan is not None:
        if what is not None:
            raise LockstepError(f"dryrun {what} --plan {plan}: the plan says which model; leave out {what}")
        load_plan(plan)
    file = Path(what) if what is not None and what.endswith((".yaml", ".yml")) else None
    config = load_config(file, set_ or [])  # mistakes are told before torch is there
    with heavy_imports():
        from rich.console import Console

        from lockstep.plan import rank_memory
        from lockstep.train.closed_form import closed_form, of_config, of_plan
        from lockstep.train.display import Display
        from lockstep.train.dryrun import dry_run, model_config, plan_config
        from lockstep.train.dryrun_report import dry_run_json, dry_run_text
        from lockstep.train.level_report import level_reports, levels_text
    if plan is None:
        shape = model_config(config.model if file is not None or what is None else what, config)
    try:
        if plan is not None:
            config, shape = plan_config(plan, set_ or [])
        with Display() as display:
            found = dry_run(config, shape, rank, partial(display.counted, f"going through the step of rank {rank}"))
    except NotRunError as why:
        known = of_config(config, shape, why) if plan is None else of_plan(plan)
        typer.echo(closed_form(why, known, rank, as_json))
        return
    named: list[Level] = [] if config.compile.level in ("auto", "O0") else [config.compile.of_model]
    asked: list[Level] = named if plan is None else ["O1", "O2"]
    with Console(stderr=True).status("compiling for the levels"):
        levels = level_reports(config, shape, rank, asked)
    if as_json:
        typer.echo(dry_run_json(found, levels))
    else:
        expected = None if plan is None else rank_memory(*of_plan(plan), rank).peak
        typer.echo("\n".join([dry_run_text(found, expected), *([levels_text(levels)] if levels else [])]))
