"""`lockstep cache ls`: what is kept on this machine."""

from __future__ import annotations

from pathlib import Path

import typer

from lockstep.cli.imports import heavy_imports


def ls() -> None:
    """List built kernels, compiled programs and packed weights, with their sizes."""
    with heavy_imports():
        from lockstep.compile.cache import entries, programs_dir
        from lockstep.model.weights import packed
        from lockstep.ops import build

    kernels = build.cache_dir()
    found = [(path.name, size_of(path)) for path in sorted(kernels.glob("*")) if path.suffix != ".lock"]
    typer.echo(f"kernels   {kernels}  {amount(sum(size for _, size in found))}")
    for name, size in found:
        typer.echo(f"  {name:40s} {amount(size):>10s}")
    programs = list(entries(programs_dir()))
    typer.echo(f"programs  {programs_dir()}  {amount(sum(size for *_, size in programs))}")
    for path, stage, size in programs:
        typer.echo(f"  {path.stem:40s} {amount(size):>10s}  {stage}")
    weights = list(packed.entries(packed.packed_dir()))
    typer.echo(f"weights   {packed.packed_dir()}  {amount(sum(size for *_, size in weights))}")
    for path, model, size in weights:
        typer.echo(f"  {path.stem:40s} {amount(size):>10s}  {model}")


def size_of(path: Path) -> int:
    """Bytes of a file, or of everything in a folder."""
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


def amount(size: int) -> str:
    """Bytes for a reader: 3.4 MB."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
