"""`lockstep hash`: one SHA-256 over all weights."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.imports import heavy_imports


def hash(directory: Annotated[str, typer.Argument(help="A directory, a .gguf file or an alias.")]) -> None:
    """Print the SHA-256 of a model's weights in canonical order; sharding and file layout do not matter."""
    with heavy_imports():
        from lockstep.model.hash import hash_path

    print(hash_path(directory))
