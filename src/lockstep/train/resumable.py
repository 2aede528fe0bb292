"""Whether there is anything to resume. Imports no torch: it is asked before the ranks of a run are started."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.errors import LockstepError


def resumable(start: str | os.PathLike[str]) -> Path:
    """The directory of a run or of a checkpoint, or LockstepError where there is none."""
    directory = Path(start).expanduser()
    if not directory.is_dir():
        raise LockstepError(
            f"there is nothing to resume: {directory} is no directory; start the run without --resume, or name its "
            "directory with --out"
        )
    return directory
