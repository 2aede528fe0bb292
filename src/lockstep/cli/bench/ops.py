"""`lockstep bench ops`: every operator against PyTorch's own."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from lockstep.cli.bench._output import Document, JsonFile, Quick, publish
from lockstep.errors import LockstepError


def ops(
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Compute dtype.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds; the sides take turns in each.")] = 15,
    only: Annotated[str, typer.Option(help="Operators whose names contain this.")] = "",
    json_file: JsonFile = None,
    write: Document = None,
    quick: Quick = False,
) -> None:
    """Every operator, forward and backward, against PyTorch's own, beside the measured peaks."""
    import torch
    from rich.console import Console

    from lockstep.bench.ops import bench_ops

    if only and write:
        raise LockstepError(
            f"--only {only} measures a part, and --write {write} would put it in place of all: leave one of them out; "
            "--json keeps a part."
        )
    with Console(stderr=True).status("measuring peaks ...") as status:
        kind = getattr(torch, dtype)
        report = bench_ops(kind, 2 if quick else rounds, quick, lambda name: status.update(name), only)
    publish(report, json_file, write)
