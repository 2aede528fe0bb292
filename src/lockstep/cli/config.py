"""`lockstep config`: what a run would use, and the reference of all keys."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.config import load_config
from lockstep.config.reference import reference
from lockstep.config.strict_yaml import dump


def config(
    what: Annotated[
        str | None, typer.Argument(metavar="CONFIG.yaml|reference", help="A YAML file, or the word `reference`.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE over the file; repeatable.")] = None,
) -> None:
    """Print the resolved configuration as YAML, or all keys as Markdown."""
    if what == "reference":
        print(reference(), end="")
    else:
        print(dump(load_config(what, set_).model_dump(mode="json")), end="")
