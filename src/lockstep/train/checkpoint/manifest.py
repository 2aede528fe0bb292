"""The manifest of a checkpoint: every file with its size and SHA-256, written last."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` holds. files: name -> {"bytes": size, "sha256": hex}."""

    format: int
    step: int
    version: str
    device_class: str
    files: dict[str, dict[str, Any]]

    def dump(self) -> str:
        return json.dumps(asdict(self), indent=1)


def describe(path: Path) -> dict[str, Any]:
    """The manifest entry of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; raises `LockstepError` that names the checkpoint and the reason."""
    path = folder / MANIFEST
    try:
        fields = json.loads(path.read_text())
        files = {name: {"bytes": int(e["bytes"]), "sha256": str(e["sha256"])} for name, e in fields["files"].items()}
        manifest = Manifest(**{**fields, "files": files})
    except FileNotFoundError as error:
        raise LockstepError(f"{folder} is no whole checkpoint: {MANIFEST} is missing") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LockstepError(f"checkpoint {folder} is damaged: {MANIFEST} cannot be read ({error})") from error
    if manifest.format != FORMAT:
        raise LockstepError(
            f"checkpoint {folder} has format {manifest.format}, this version of Lockstep reads format {FORMAT}"
        )
    return manifest


def verify(folder: Path) -> Manifest:
    """Read every file of a checkpoint and compare it with the manifest.

    Raises `LockstepError` that names the checkpoint, the file and what is wrong with it.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        fault = _fault(folder / name, expected)
        if fault:
            raise LockstepError(f"checkpoint {folder} is damaged: {name} {fault}")
    return manifest


def _fault(path: Path, expected: dict[str, Any]) -> str | None:
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != expected["bytes"]:
        kind = "truncated" if size < expected["bytes"] else "too long"
        return f"is {kind}: {size} bytes where the manifest says {expected['bytes']}"
    if describe(path)["sha256"] != expected["sha256"]:
        return "was altered: its SHA-256 is not the manifest's"
    return None
