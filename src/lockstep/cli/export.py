"""`lockstep export`: any model that loads, as a Hugging Face directory."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from lockstep.cli.imports import heavy_imports


def export(
    model: Annotated[
        str, typer.Argument(help="A directory (of a model, a run, an adapter), a .gguf file or an alias.")
    ],
    directory: Annotated[str, typer.Argument(help="Where to write; a former export is replaced.")],
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Dtype of the written weights.")] = "bfloat16",
    force: Annotated[bool, typer.Option("--force", help="Replace a directory that is no former export.")] = False,
) -> None:
    """Write a model as a directory that `transformers` loads; adapters are merged into the weights."""
    with heavy_imports():
        from lockstep.model import load
        from lockstep.model.hash import hash_path
        from lockstep.model.source import resolve

    load(model, dtype=dtype, numerics="fast").save(directory, force=force)
    print(f"wrote {directory} from {resolve(model)} ({dtype}, weights {hash_path(directory)[:16]})")
