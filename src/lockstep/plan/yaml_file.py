"""A YAML or JSON file that a person gave, without the traps of either: no key twice, no number that is none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lockstep.config.strict_yaml import dump, parse
from lockstep.errors import LockstepError


def read_yaml(path: str | Path, what: str) -> Any:
    """The file's content; JSON is YAML too. what: the file's part in the error. Raises LockstepError for what is no
    YAML, or cannot be read."""
    return parse(_text(path, what, "YAML"), f"{what} {path}")


def read_json(path: str | Path, what: str) -> Any:
    """The same of a file that must be JSON, as other programs write it."""
    try:
        return json.loads(_text(path, what, "JSON"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise LockstepError(f"{what} {path} is not JSON: {error}") from error


def write_yaml(path: str | Path, content: Any) -> None:
    """Write a file that `read_yaml` gives back, innermost lists and mappings on one line each. Raises OSError."""
    Path(path).write_text(dump(content, flow=None), encoding="utf-8")


def check_can_write(path: str | Path, option: str = "--out") -> None:
    """Raise LockstepError where a file cannot be written, before time is spent on what goes into it. option: that named
    it."""
    file = Path(path)
    reason = (
        "it is a directory" if os.path.isdir(file)
        else f"there is no directory {file.parent}" if not os.path.isdir(file.parent)
        else "no right to write there" if not os.access(file if os.path.exists(file) else file.parent, os.W_OK)
        else ""
    )  # fmt: skip
    if reason:
        raise LockstepError(f"cannot write {file}: {reason}. Choose another {option}.")


def _text(path: str | Path, what: str, kind: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise LockstepError(f"{what} {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # UnicodeDecodeError, or a path with a null character
        raise LockstepError(f"{what} {path} cannot be read as {kind}: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a key that stands twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice; keep one")
        found[key] = value
    return found
