"""`lockstep bench decode`: tokens per second against the memory bandwidth."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.bench._output import Document, JsonFile, Quick, publish
from lockstep.cli.options import whole_numbers


def decode(
    model: Annotated[str, typer.Option(help="Shape with random weights: smollm2-135m, llama-27m.")] = "smollm2-135m",
    clients: Annotated[str, typer.Option(help="How many decode at once, comma-separated.")] = "1,8",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each client.")] = 40,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; every number of clients decodes once in each.")] = 5,
    json_file: JsonFile = None,
    write: Document = None,
    quick: Quick = False,
) -> None:
    """Tokens per second of the engine, and the share of the measured memory bandwidth."""
    from rich.console import Console

    from lockstep.bench.decode import bench_decode

    sizes = whole_numbers("--clients", clients, "1,8")
    with Console(stderr=True).status("drawing weights ...") as status:
        if quick:
            report = bench_decode("tiny", sizes, 4, 2, status.update)
        else:
            report = bench_decode(model, sizes, tokens, rounds, status.update)
    publish(report, json_file, write)
