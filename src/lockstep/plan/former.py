"""Files that a plan is written to: an earlier plan's are replaced, anybody else's only where that was asked for."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.plan.yaml_file import check_can_write

GENERATOR = '<meta name="generator" content="lockstep plan">'
"""In the head of a page, which tells that it is a plan's report."""
_MARKS = {"plan": "plan: ", "coefficients": "coefficients: ", "report": GENERATOR, "trace": '{"traceEvents": '}
"""What stands near the beginning of a file of each kind."""
_BEGINNING = 1024


def is_former(file: Path, kind: str) -> bool:
    """Whether a file is there which an earlier command wrote. kind: plan, coefficients, report or trace."""
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return _MARKS[kind] in content.read(_BEGINNING).decode("utf-8", "replace")


def check_target(file: Path, kind: str, force: bool) -> None:
    """Raise LockstepError where a file cannot be written, or is there and something else than a former one of its
    kind, unless forced: before time is spent on what goes into it."""
    check_can_write(file)
    if force or not file.is_file() or not file.stat().st_size or is_former(file, kind):
        return
    raise LockstepError(f"{file} is there and no earlier {kind}: choose another --out, or replace it with --force.")
