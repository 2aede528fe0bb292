"""`lockstep bench structured`: what a JSON schema costs a decoding step."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.bench._output import Document, JsonFile, Quick, publish
from lockstep.cli.options import whole_numbers


def structured(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file or an alias.")] = "smollm2-135m",
    clients: Annotated[str, typer.Option(help="How many sequences share a step, comma-separated.")] = "1,8",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each sequence.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; both ways run once in each.")] = 5,
    quick: Quick = False,
    json_file: JsonFile = None,
    write: Document = None,
) -> None:
    """A decoding step with a JSON schema for every sequence, beside one without."""
    from rich.console import Console

    from lockstep.bench import describe
    from lockstep.bench.structured import structured
    from lockstep.model import load

    sizes = ((1,), 4, 1) if quick else (whole_numbers("--clients", clients, "1,8,32"), tokens, rounds)
    with Console(stderr=True).status("decoding both ways"):
        report = structured(load(model), *sizes, describe(), f"lockstep bench structured {model}")
    publish(report, json_file, write)
