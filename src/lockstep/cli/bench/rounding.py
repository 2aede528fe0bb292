"""`lockstep bench rounding`: how far bfloat16 logits are from float32 ones."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.bench._output import Document, JsonFile, publish
from lockstep.errors import LockstepError


def rounding(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file or an alias, with a tokenizer.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text.")] = 256,
    json_file: JsonFile = None,
    write: Document = None,
) -> None:
    """How far bfloat16 logits are from float32 ones, ours and transformers'."""
    import importlib.util

    from rich.console import Console

    if importlib.util.find_spec("transformers") is None:
        raise LockstepError("transformers is not installed, and this bench compares with it: pip install transformers")

    from lockstep.bench.rounding import bench_rounding

    with Console(stderr=True).status("computing logits ..."):
        report = bench_rounding(model, tokens)
    publish(report, json_file, write)
