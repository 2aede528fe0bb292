"""Which checkpoints stay: the newest ``keep_last``, and for ever those of every ``keep_every`` steps."""

from __future__ import annotations

import shutil
from pathlib import Path

from lockstep.train.checkpoint.layout import checkpoints, step_of


def prune(out: Path, keep_last: int, keep_every: int) -> list[Path]:
    """Remove what need not stay and return it. Called after a save, so the newest whole one is always kept."""
    removed = [p for p in checkpoints(out)[:-keep_last] if not _for_ever(p, keep_every)]
    for path in removed:
        # Out of the name first: killed half-way, no half-removed directory looks like a checkpoint.
        gone = path.with_name(f".tmp-{path.name}")
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    return removed


def _for_ever(path: Path, keep_every: int) -> bool:
    return keep_every > 0 and (step_of(path) or 0) % keep_every == 0


def set_aside_after(out: Path, step: int) -> list[Path]:
    """Rename checkpoints of later steps to ``set-aside-<name>``: a run that goes on from ``step`` writes its own."""
    later = [p for p in checkpoints(out) if (step_of(p) or 0) > step]
    for path in later:
        name, number = f"set-aside-{path.name}", 1
        while path.with_name(name).exists():
            number += 1
            name = f"set-aside-{path.name}-{number}"
        path.rename(path.with_name(name))
    return later
