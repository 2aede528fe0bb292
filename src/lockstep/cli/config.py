"""`lockstep config`: what a run would use, and the reference of all keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep.config import load_config
from lockstep.config.reference import reference
from lockstep.config.strict_yaml import dump


def config(
    what: Annotated[
        Literal["show", "reference"], typer.Argument(help="The resolved configuration, or the reference of all keys.")
    ] = "show",
    file: Annotated[Path | None, typer.Option("--config", "-c", help="A YAML file.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE over the file; repeatable.")] = None,
) -> None:
    """Print the resolved configuration as YAML, or the reference of all keys as Markdown."""
    resolved = load_config(file, set_)
    print(reference() if what == "reference" else dump(resolved.model_dump(mode="json")), end="")
