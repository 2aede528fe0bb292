"""`lockstep bench compile`: compile and step times of the levels, by depth."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.bench._output import Document, JsonFile, Quick, publish
from lockstep.cli.imports import heavy_imports
from lockstep.errors import LockstepError


def compile(
    layers: Annotated[str, typer.Option(help="Depths, with commas.")] = "4,16,48,96",
    vs: Annotated[str, typer.Option(help="Peers, with commas: torch (torch.compile of transformers); none.")] = "torch",
    rounds: Annotated[int, typer.Option(help="Steps of each level.")] = 7,
    quick: Quick = False,
    json_file: JsonFile = None,
    write: Document = None,
) -> None:
    """Compile time of every level by depth, cold and from the cache, and the time of a step."""
    from rich.console import Console

    with heavy_imports():
        from lockstep.bench.compiling.measure import compile_report

    peers = [name for name in vs.split(",") if name not in ("", "none")]
    if set(peers) - {"torch"}:
        raise LockstepError(f"--vs {vs}: known is torch, or none for no peer")
    if not all(part.strip().isdigit() and int(part) > 0 for part in layers.split(",")):
        raise LockstepError(f"--layers {layers}: expected whole numbers with commas, such as 4,16,48")
    depths = [2, 4] if quick else sorted(int(part) for part in layers.split(","))
    command = f"lockstep bench compile --layers {layers} --vs {vs} --rounds {rounds}"
    with Console(stderr=True).status("starting") as status:
        report = compile_report(depths, [] if quick else peers, 2 if quick else rounds, status.update, command)
    publish(report, json_file, write)
