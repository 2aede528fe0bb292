"""What a step needs from other layer groups, and what it gives them."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.parallel.schedules.table import Step, Table


class Need(NamedTuple):
    """What a step waits for from a neighbouring group: the activation (F) or the gradient (B) of a micro-batch."""

    forward: bool
    micro_batch: int
    group: int


def needs(table: Table, device: int, step: Step) -> list[Need]:
    """What ``step`` of ``device`` needs from the steps of other groups (on this or another device)."""
    found = []
    for kind, micro_batch, chunk, _ in (step,) if step.partner is None else step.parts:
        if kind == "W":
            continue
        group = table.group(device, chunk)
        if kind == "F" and group > 0:
            found.append(Need(True, micro_batch, group - 1))
        elif kind != "F" and group < table.groups - 1:
            found.append(Need(False, micro_batch, group + 1))
    return found


def gives(table: Table, device: int, step: Step) -> list[Need]:
    """The needs of others that ``step`` of ``device`` fulfils when it ends."""
    parts = (step,) if step.partner is None else step.parts
    return [Need(kind == "F", number, table.group(device, chunk)) for kind, number, chunk, _ in parts if kind != "W"]
