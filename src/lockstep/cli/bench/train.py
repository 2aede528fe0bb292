"""`lockstep bench train`: training speed and memory, side by side with peers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.bench._output import Document, JsonFile, Quick, publish

PEERS = Path("~/.cache/lockstep/peers")


def train(
    model: Annotated[str, typer.Option(help="Shape with random weights: llama-27m, smollm2-135m.")] = "llama-27m",
    vs: Annotated[
        str,
        typer.Option(
            help="Sides, comma-separated: hf-eager, hf-compile, either with -float32; lockstep-O1, lockstep-O2, "
            "lockstep-fast, lockstep-fast-float32, lockstep-float32, lockstep-float32-O2, lockstep-pure-bf16; "
            "mindspore."
        ),
    ] = "hf-eager,hf-compile",
    peers: Annotated[Path, typer.Option(help="Where benchmarks/peers.sh installed them.")] = PEERS,
    rounds: Annotated[int, typer.Option(min=1, help="Measured steps of each side.")] = 5,
    json_file: JsonFile = None,
    write: Document = None,
    quick: Quick = False,
) -> None:
    """Training speed and peak memory against transformers, a step each in turn."""
    from rich.console import Console

    from lockstep.bench.train import bench_train

    names = [name.strip() for name in vs.split(",") if name.strip()]
    console = Console(stderr=True)
    with console.status("starting the sides ..."):
        if quick:
            report = bench_train("tiny", names, 2, peers.expanduser(), (2, 32), console.log)
        else:
            report = bench_train(model, names, rounds, peers.expanduser(), note=console.log)
    publish(report, json_file, write)
