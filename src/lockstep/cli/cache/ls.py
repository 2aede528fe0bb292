"""`lockstep cache ls`: what is kept on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lockstep import quantities
from lockstep.cli.imports import heavy_imports


@dataclass(frozen=True)
class Entry:
    """One thing that is kept. of: what it is for. written: seconds since 1970."""

    name: str
    of: str
    size: int
    written: float


def ls(
    each: Annotated[bool, typer.Option("--each", help="A line for every entry, not for every kind.")] = False,
) -> None:
    """List built kernels, compiled programs and packed weights, with their sizes."""
    with heavy_imports():
        from lockstep.compile.cache import entries, programs_dir
        from lockstep.model.weights import packed
        from lockstep.ops import build

    kernels = build.cache_dir()
    objects, weights = kernels.parent / "objects", packed.packed_dir()
    for title, directory, found in (
        ("kernels", kernels, _built(kernels)),
        ("objects", objects, [_entry(path, "compiled source", size_of(path)) for path in objects.glob("*.o")]),
        ("programs", programs_dir(), [_entry(*one) for one in entries(programs_dir())]),
        ("weights", weights, [_entry(*one) for one in packed.entries(weights)]),
    ):
        typer.echo(f"{title:9s} {directory}  {quantities.size(sum(one.size for one in found))}")
        for line in _each(found) if each else _kinds(found):
            typer.echo(f"  {line}")


def _kinds(found: Sequence[Entry]) -> list[str]:
    """A line for all entries that are for the same thing."""
    lines = []
    for kind in sorted({one.of for one in found}):
        some = [one for one in found if one.of == kind]
        count, held = quantities.entries(len(some)), quantities.size(sum(one.size for one in some))
        lines.append(f"{count:>12s} {held:>10s}  newest {_moment(max(one.written for one in some))}  {kind}")
    return lines


def _each(found: Sequence[Entry]) -> list[str]:
    ordered = sorted(found, key=lambda one: (one.of, one.written))
    return [f"{quantities.size(one.size):>10s}  {_moment(one.written)}  {one.name:40s}  {one.of}" for one in ordered]


def _built(directory: Path) -> list[Entry]:
    """Kernels by instruction set, the first word of their names. A build that goes on is none."""
    paths = [path for path in directory.glob("*-*") if path.suffix != ".lock" and not path.name.startswith("build-")]
    return [_entry(path, path.name.partition("-")[0], size_of(path)) for path in paths]


def _entry(path: Path, of: str, size: int) -> Entry:
    return Entry(path.stem, of, size, path.stat().st_mtime if path.exists() else 0.0)


def _moment(written: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(written))


def size_of(path: Path) -> int:
    """Bytes of a file, or of everything in a folder."""
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
