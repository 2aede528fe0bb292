"""Which passes run at which level, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lockstep.compile.passes.base import Pass
from lockstep.compile.passes.buckets import BUCKETS
from lockstep.compile.passes.constants import CONSTANTS
from lockstep.compile.passes.dead import DEAD_CODE
from lockstep.compile.passes.duplicates import DUPLICATES
from lockstep.compile.passes.fuse_branch import BRANCH
from lockstep.compile.passes.fuse_norm import NORM
from lockstep.compile.passes.fuse_products import PRODUCTS
from lockstep.compile.passes.fuse_rope import ROPE
from lockstep.compile.passes.join_products import JOINT
from lockstep.compile.passes.overlap import OVERLAP
from lockstep.compile.passes.recompute import RECOMPUTE
from lockstep.compile.passes.views import VIEWS
from lockstep.config.names import nearest
from lockstep.errors import LockstepError

Level = Literal["O0", "O1", "O2"]

_ALL: tuple[Pass, ...] = (
    CONSTANTS, VIEWS, DUPLICATES, DEAD_CODE, RECOMPUTE, PRODUCTS, JOINT, NORM, BRANCH, ROPE, BUCKETS, OVERLAP,
)  # fmt: skip
"""Every pass in the order in which they run. What is computed again is chosen before the fusions: a fused operator's
results could only be kept or given up together."""

_WHOLE_STEP = frozenset({"overlap-collectives"})
"""Passes that need the whole step in one graph: level O2 only."""


def pipeline(level: Level, disable: Sequence[str] = (), only: Sequence[str] = ()) -> tuple[Pass, ...]:
    """The passes of a level in order, without those in `disable`, or only those in `only`; none at O0.

    LockstepError for a name that is no pass, where both lists are given, and where none of `only` runs at the level,
    as at O0.
    """
    if disable and only:
        raise LockstepError(
            "compile.disable_pass and compile.only_pass exclude each other: the first names passes to leave out, the "
            "second all that run. Give one of them."
        )
    for key, names in (("compile.disable_pass", disable), ("compile.only_pass", only)):
        for name in names:
            _check(key, name)
    if level == "O0" and only:
        raise LockstepError(
            f"compile.only_pass: {', '.join(only)} does not run at O0, where no pass does. Set compile.level to O1 or "
            "O2, or leave compile.only_pass out."
        )
    if level == "O0":
        return ()
    chosen = [step for step in _ALL if level == "O2" or step.name not in _WHOLE_STEP]
    found = tuple(step for step in chosen if step.name not in disable and (not only or step.name in only))
    if only and not found:
        raise LockstepError(
            f"compile.only_pass: {', '.join(only)} needs the whole step in one graph, and {level} compiles block by "
            "block. Set compile.level to O2, or name another pass."
        )
    return found


def pass_names() -> tuple[str, ...]:
    """The names of all passes in the order in which they run."""
    return tuple(step.name for step in _ALL)


def _check(key: str, name: str) -> None:
    names = list(pass_names())
    if name not in names:
        best, alike = nearest(name, names)
        hint = f"Did you mean {best!r}? " if alike else ""
        raise LockstepError(f"{key}: there is no pass {name!r}. {hint}The passes are: {', '.join(names)}.")
