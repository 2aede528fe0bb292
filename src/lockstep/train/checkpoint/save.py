"""Saving: everything is written and synced beside, then one rename makes it a checkpoint.

Killed at any point, the run has its older checkpoints and at most an unfinished ``.tmp-`` directory, which no
reader looks at and which the next trainer removes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.model.weights.safetensors_dir import save_tensors
from lockstep.train.checkpoint.manifest import FORMAT, MANIFEST, Manifest, describe

_UNFINISHED = ".tmp-"
_REPLACED = ".old-"


def save_checkpoint(
    path: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    documents: Mapping[str, Any],
    version: str,
    device_class: str,
    extra: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint at ``path``, replacing one of the same step.

    tensors: file stem -> tensors of ``<stem>.safetensors``. documents: file stem -> value of ``<stem>.json``.
    extra: writes more files into the folder it is given. Raises `LockstepError` when the disk is full or not
    writable; nothing that was there before is touched then.
    """
    beside = path.with_name(_UNFINISHED + path.name)
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        for stem, group in tensors.items():
            save_tensors({name: t.detach().contiguous() for name, t in group.items()}, beside / f"{stem}.safetensors")
        for stem, value in documents.items():
            (beside / f"{stem}.json").write_text(json.dumps(value, indent=1))
        if extra is not None:
            extra(beside)
        _seal(beside, step, version, device_class)
        _publish(beside, path)
    except Exception as error:
        shutil.rmtree(beside, ignore_errors=True)
        # safetensors reports a full disk as its own error, so the kind is not told apart here.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise LockstepError(
            f"cannot save checkpoint {path}: {reason}. Older checkpoints are untouched; free space there, or "
            "point train.out at another disk"
        ) from error


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed save left behind. Only for the holder of the run's lock."""
    for path in folder.iterdir() if folder.is_dir() else []:
        if path.name.startswith(_UNFINISHED):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(_REPLACED):
            # Killed between the two renames of `_publish`: the old checkpoint goes back to its place.
            original = path.with_name(path.name[len(_REPLACED) :])
            shutil.rmtree(path, ignore_errors=True) if original.exists() else path.rename(original)


def _seal(folder: Path, step: int, version: str, device_class: str) -> None:
    """Sync every file, then write the manifest and sync that and the directories."""
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    for name in names:
        _sync(folder / name)
    files = {name: describe(folder / name) for name in names}
    (folder / MANIFEST).write_text(Manifest(FORMAT, step, version, device_class, files).dump())
    _sync(folder / MANIFEST)
    for inner in [p for p in folder.rglob("*") if p.is_dir()]:
        _sync(inner)
    _sync(folder)


def _publish(beside: Path, path: Path) -> None:
    old = path.with_name(_REPLACED + path.name)
    if path.exists():
        path.rename(old)
    beside.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
