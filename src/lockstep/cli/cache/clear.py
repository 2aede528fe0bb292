"""`lockstep cache clear`: remove what is kept on this machine; it is made again when it is needed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.imports import heavy_imports
from lockstep.errors import LockstepError
from lockstep.quantities import entries


def clear(
    programs: Annotated[bool, typer.Option("--programs", help="Only compiled programs.")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Only built kernels.")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="Only packed weights.")] = False,
) -> None:
    """Remove compiled programs, built kernels and packed weights (all, or the kinds that are named)."""
    with heavy_imports():
        from lockstep.compile.cache import programs_dir
        from lockstep.model.weights.packed import packed_dir
        from lockstep.ops import build

    every, built = not (programs or kernels or weights), build.cache_dir()
    chosen = [programs_dir()] if programs or every else []
    chosen += [built, built.parent / "objects"] if kernels or every else []
    chosen += [packed_dir()] if weights or every else []
    for directory in chosen:
        count = _entries(directory)
        shutil.rmtree(directory, ignore_errors=True)  # a running process keeps what it has loaded
        left = _entries(directory)
        typer.echo(f"removed {entries(count - left)} of {directory}")
        if left:
            raise LockstepError(f"{entries(left)} of {directory} could not be removed: check the directory's rights")


def _entries(directory: Path) -> int:
    return sum(1 for path in directory.glob("*") if path.suffix != ".lock")
