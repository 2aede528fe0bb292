"""`lockstep bench load`: time to load a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.bench._output import Document, JsonFile, Quick, publish


def load(
    directory: Annotated[Path | None, typer.Argument(help="A Hugging Face directory; none: random weights.")] = None,
    model: Annotated[str, typer.Option(help="Shape with random weights, without a directory.")] = "smollm2-135m",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the sides take turns in each.")] = 9,
    json_file: JsonFile = None,
    write: Document = None,
    quick: Quick = False,
) -> None:
    """Time to load a model directory, beside transformers' from_pretrained."""
    import importlib.util

    from rich.console import Console

    from lockstep.bench.load import bench_load

    peer = importlib.util.find_spec("transformers") is not None
    with Console(stderr=True).status("writing weights ...") as status:
        shape, count = ("tiny", 2) if quick else (model, rounds)
        report = bench_load(directory, shape, count, status.update, peer)
    publish(report, json_file, write)
