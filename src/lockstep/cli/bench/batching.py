"""`lockstep bench batching`: continuous against static batching of our own engine."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.bench._output import Document, JsonFile, Quick, publish


def batching(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file or an alias.")] = "smollm2-135m",
    rounds: Annotated[int, typer.Option(help="Rounds; every way runs once in each.", min=1)] = 3,
    quick: Quick = False,
    json_file: JsonFile = None,
    write: Document = None,
) -> None:
    """Continuous against static batching, and the share of a step that scheduling and sampling take."""
    from rich.console import Console

    from lockstep.bench import describe
    from lockstep.bench.batching import Mix, batching
    from lockstep.model import load

    mix = Mix(4, (8, 20), (2, 6), 12, 2) if quick else Mix()
    with Console(stderr=True).status("loading the model") as status:
        report = batching(
            load(model), mix, 1 if quick else rounds, describe(), f"lockstep bench batching {model}",
            lambda done: status.update(f"serving the mix every way: {done:.0%}"),
        )  # fmt: skip
    publish(report, json_file, write)
