"""`lockstep cache clear`: remove what is kept on this machine; it is made again when it is needed."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from lockstep.cli.imports import heavy_imports


def clear(
    programs: Annotated[bool, typer.Option("--programs", help="Only compiled programs.")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Only built kernels.")] = False,
) -> None:
    """Remove compiled programs and built kernels (both, or the kind that is named)."""
    with heavy_imports():
        from lockstep.compile.cache import programs_dir
        from lockstep.ops import build

    both, built = programs == kernels, build.cache_dir()
    chosen = [programs_dir()] if programs or both else []
    for directory in [*chosen, *([built, built.parent / "objects"] if kernels or both else [])]:
        count = sum(1 for path in directory.glob("*") if path.suffix != ".lock")
        shutil.rmtree(directory, ignore_errors=True)  # a running process keeps the library that it has loaded
        typer.echo(f"removed {count} entries of {directory}")
