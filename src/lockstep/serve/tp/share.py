"""What a rank computes with besides its part of the model: sums that a program can call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.model import Model
from lockstep.ops import Operators, operators
from lockstep.parallel.nodes import Group
from lockstep.parallel.partition import Partition
from lockstep.serve.tp.fit import ServedPart


@dataclass(frozen=True)
class Share:
    """captured: the operators, for a graph; None where what reaches across ranks cannot be in one. groups: who adds,
    for a program made of such graphs."""

    captured: Operators | None
    groups: Mapping[str, Group]


def share_of(model: Model, part: ServedPart) -> Share:
    """A rank's share. model: what it holds."""
    if not isinstance(part, Partition):
        return Share(None, {})
    captured = part.operators(operators(model.ops.numerics), captured=True)
    return Share(captured, {"tp": Group(part.mesh["tp"])})
