"""`lockstep eval bits MODEL`: prove on a model that every path gives the same bits."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from lockstep.cli.imports import heavy_imports
from lockstep.cli.options import Dtype, ModelArgument, Numerics, whole_numbers
from lockstep.errors import LockstepError


def eval(
    what: Annotated[str, typer.Argument(help="What to evaluate: bits.")],
    model: ModelArgument,
    dtype: Dtype = "bfloat16",
    numerics: Numerics = "bitwise",
    lengths: Annotated[
        str, typer.Option(help="Tokens of the sequences, comma-separated; one of more than 128 lies in three pages.")
    ] = "5,130,1",
    seed: Annotated[int, typer.Option(help="Draws the tokens.")] = 0,
) -> int:
    """Run a model through every path (training, prefill, decode, cache hits ...) and compare raw bytes."""
    with heavy_imports():
        import torch
        from rich.console import Console
        from rich.table import Table

        from lockstep.model import load
        from lockstep.ops.device_class import device_class
        from lockstep.serve.bits import prove
        from lockstep.train.display import Display

    if what != "bits":
        raise LockstepError(f"nothing called {what!r} can be evaluated: use `lockstep eval bits MODEL`.")
    loaded = load(model, dtype=dtype, numerics=numerics)
    generator = torch.Generator().manual_seed(seed)
    sizes = whole_numbers("--lengths", lengths, "5,70,1", loaded.config.max_positions)
    sequences = [torch.randint(loaded.config.vocab_size, (n,), generator=generator).tolist() for n in sizes]
    table = Table(title=f"{model}: {dtype}, numerics {numerics}, {device_class()}")
    for heading in ("path", "values compared", "differ", "starts at"):
        table.add_column(heading, justify="right" if heading in ("values compared", "differ") else "left")
    console, differ, compared = Console(), 0, 0
    with Display() as display:
        for proof in prove(loaded, sequences, partial(display.counted, "passes through the model")):
            place = "" if proof.place is None else f"{proof.place.module}: {proof.place.operator}"
            table.add_row(proof.path, f"{proof.compared:,}", f"{proof.differ:,}", place)
            differ, compared = differ + proof.differ, compared + proof.compared
    console.print(table)
    console.print(f"{differ:,} of {compared:,} values differ")
    return 1 if differ else 0
