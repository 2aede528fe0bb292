"""`lockstep bench compile`: compile and step times of the levels, by depth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.bench._output import Document, JsonFile, Quick, publish
from lockstep.cli.bench.train import PEERS
from lockstep.cli.imports import heavy_imports
from lockstep.cli.options import whole_numbers
from lockstep.errors import LockstepError


def compile(
    layers: Annotated[str, typer.Option(help="Depths, with commas.")] = "4,16,48,96",
    vs: Annotated[
        str, typer.Option(help="Peers, with commas: torch (torch.compile of transformers), mindspore; none.")
    ] = "torch",
    peers: Annotated[Path, typer.Option(help="Where benchmarks/peers.sh installed them.")] = PEERS,
    rounds: Annotated[int, typer.Option(help="Steps of each level.")] = 7,
    quick: Quick = False,
    json_file: JsonFile = None,
    write: Document = None,
) -> None:
    """Compile time of every level by depth, cold and from the cache, and the time of a step."""
    from rich.console import Console

    with heavy_imports():
        from lockstep.bench.compiling.measure import compile_report

    names = [name for name in vs.split(",") if name not in ("", "none")]
    if set(names) - {"torch", "mindspore"}:
        raise LockstepError(f"--vs {vs}: known are torch and mindspore, or none for no peer")
    chosen = whole_numbers("--layers", layers, "4,16,48")
    names = [] if quick else names
    depths = [2, 4] if quick else sorted(chosen)
    command = f"lockstep bench compile --layers {layers} --vs {vs} --rounds {rounds}"
    with Console(stderr=True).status("starting") as status:
        report = compile_report(depths, names, 2 if quick else rounds, status.update, command, peers.expanduser())
    publish(report, json_file, write)
