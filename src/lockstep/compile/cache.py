"""The compile cache: recipes on disk, so that a second process captures nothing.

An entry is one JSON file: plain lists and numbers, no code. Its name is a hash of the stage (module, shapes, dtypes,
passes), of PyTorch's version and of the device class. Within it stands what made it: our version and a hash of the
sources that decide what a recipe says. Where that differs, or a byte of the entry does, it is compiled again with one
line saying so. An entry is written beside its place and renamed into it, so that processes that race each see a whole
one or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from lockstep.compile.halves import Halves, halves_from
from lockstep.ops import build
from lockstep.ops.device_class import device_class
from lockstep.sources import made_by

_SOURCES = ("compile", "memory", "model", "ops")
"""Rooms whose sources decide what a recipe says."""

Note = Callable[[str], None]


class Cache:
    """Recipes in a directory, by default `lockstep/programs` under XDG_CACHE_HOME or ~/.cache."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or programs_dir()
        self._refused = False

    def load(self, key: str, note: Note) -> Halves | None:
        """The entry of a key, or None; a line to `note` where there is one that does not count."""
        path = self._path(key)
        try:
            return _read(path, key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except _Refused as refused:
            note(f"the compiled program {path.name} is not used: {refused}; compiling again")
            return None

    def store(self, key: str, halves: Halves, note: Note) -> None:
        """Keep an entry. A disk that refuses costs one line, not the run."""
        body = json.dumps(halves.tree(), separators=(",", ":"))
        head = json.dumps({"made_by": made_by(*_SOURCES), "key": key, "sha256": _hash(body)})
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _write(self._path(key), f"{head}\n{body}")
        except OSError as error:
            if not self._refused:
                note(f"compiled programs are not kept in {self.directory}: {error.strerror or error}")
            self._refused = True

    def _path(self, key: str) -> Path:
        name = _hash("\0".join([key, torch.__version__, device_class()]))
        return self.directory / f"{name[:32]}.json"


def programs_dir() -> Path:
    """Where compiled programs lie, beside the kernels."""
    return build.cache_dir().parent / "programs"


def entries(directory: Path) -> Iterator[tuple[Path, str, int]]:
    """Path, stage and bytes of every entry in a directory."""
    for path in sorted(directory.glob("*.json")):
        try:
            with open(path, encoding="utf-8") as file:
                stage = json.loads(json.loads(file.readline())["key"])[0][0]
            yield path, stage, path.stat().st_size
        except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
            yield path, "damaged", path.stat().st_size if path.exists() else 0


class _Refused(Exception):
    """An entry that does not count, and why."""


def _read(path: Path, key: str) -> Halves:
    try:
        head, _, body = path.read_text(encoding="utf-8").partition("\n")
        about = json.loads(head)
        if about["made_by"] != made_by(*_SOURCES):
            raise _Refused("it was made by other sources of Lockstep")
        if about["key"] != key or about["sha256"] != _hash(body):
            raise _Refused("it is damaged")
        return halves_from(json.loads(body))
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise _Refused(f"it cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _Refused("it is damaged") from error


def _write(path: Path, text: str) -> None:
    """A whole file or none; nothing of it is left where the disk refuses. What lies in its place goes."""
    handle, name = tempfile.mkstemp(prefix="new-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
