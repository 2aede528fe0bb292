"""Where checkpoints lie: ``<out>/checkpoints/step-00000120``, one directory per step."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.train.checkpoint.manifest import verify

FOLDER = "checkpoints"
RUN_CONFIG = "config.yaml"
"""The resolved configuration's file, in a checkpoint and in the run's directory."""
_NAME = re.compile(r"step-(\d{8,})")


def step_path(out: Path, step: int) -> Path:
    """The directory of the checkpoint after ``step`` updates."""
    return out / FOLDER / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name, None if this is not one's name."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else None


def checkpoints(out: Path) -> list[Path]:
    """All checkpoint directories of a run, oldest first, whole or not."""
    folder = out / FOLDER
    found = [p for p in folder.iterdir() if step_of(p) is not None] if folder.is_dir() else []
    return sorted(found, key=lambda p: step_of(p) or 0)


def newest_whole(out: Path) -> Path | None:
    """The newest checkpoint that is whole, every file checked; None if there is none."""
    for path in reversed(checkpoints(out)):
        try:
            verify(path)
        except LockstepError:
            continue
        return path
    return None
