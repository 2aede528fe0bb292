"""`lockstep bench contract`: what `bitwise` costs against `fast`."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from lockstep.cli.bench._output import Document, JsonFile, Quick, publish
from lockstep.cli.options import Dtype, whole_numbers
from lockstep.errors import LockstepError


def contract(
    model: Annotated[str, typer.Option(help="Shape with random weights: llama-27m, smollm2-135m.")] = "llama-27m",
    dtype: Dtype = "bfloat16",
    batch: Annotated[str, typer.Option(help="Sequences x tokens of each, of a training step.")] = "1x64",
    clients: Annotated[str, typer.Option(help="How many decode at once, comma-separated.")] = "1,8",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each client.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; every side runs once in each.")] = 3,
    json_file: JsonFile = None,
    write: Document = None,
    quick: Quick = False,
) -> None:
    """Training and decoding under numerics bitwise and fast, in turn."""
    from rich.console import Console

    from lockstep.bench.contract import bench_contract

    if not (size := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", batch)):
        raise LockstepError(f"--batch is {batch!r}: give sequences x tokens, such as 1x64.")
    given = (model, dtype, (int(size[1]), int(size[2])), whole_numbers("--clients", clients, "1,8"), tokens, rounds)
    with Console(stderr=True).status("drawing weights ...") as status:
        if quick:
            given = ("tiny", dtype, (1, 16), (1, 2), 2, 1)
        report = bench_contract(*given, note=status.update)
    publish(report, json_file, write)
