"""What a file kept on disk was made by: our version and a hash of the sources that decided what it says."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path


@lru_cache
def made_by(*rooms: str) -> str:
    """Our version and a hash of the sources of these rooms, such as `ops` and `model`."""
    return f"lockstep {version('lockstep')}, sources {_digest(rooms)[:16]}"


def _digest(rooms: Sequence[str]) -> str:
    digest, package = hashlib.sha256(), Path(__file__).parent
    for room in rooms:
        for file in sorted((package / room).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
