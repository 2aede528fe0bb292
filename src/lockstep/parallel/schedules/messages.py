"""Who sends what to whom: the sends and receives that a table implies, in an order that needs no tags."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from lockstep.parallel.schedules.dependencies import Need, gives, needs
from lockstep.parallel.schedules.program import walk
from lockstep.parallel.schedules.table import Table

AHEAD = 2
"""Receives of one sender that are posted before they are needed, so that data moves while a step computes."""


class Message(NamedTuple):
    """An activation (``forward``) or the gradient of one, of a micro-batch, from one device to a neighbouring group's.

    ``after``: the index of the sender's step that makes it; ``before``: the index of the receiver's step that needs it.
    """

    forward: bool
    micro_batch: int
    group: int  # the layer group that made it
    sender: int
    receiver: int
    after: int
    before: int

    @property
    def made(self) -> Need:
        """What it brings: forward or not, micro-batch, the group that made it."""
        return Need(self.forward, self.micro_batch, self.group)


def messages(table: Table) -> dict[tuple[int, int], list[Message]]:
    """For every (sender, receiver), their messages in the order of sending.

    A transport that keeps the order of a pair of devices needs no tags: the receiver posts its receives in this order,
    whatever order it uses them in. Results that stay on their device are not listed.
    """
    used = {need: (device, index) for device, index, need in _uses(table)}
    found: dict[tuple[int, int], list[Message]] = {}
    for sender, row in enumerate(table.rows):
        for after, step in enumerate(row):
            for made in gives(table, sender, step):
                receiver, before = used.get(made, (sender, after))
                if receiver != sender:
                    found.setdefault((sender, receiver), []).append(Message(*made, sender, receiver, after, before))
    return found


def told(channels: Mapping[tuple[int, int], list[Message]]) -> dict[Need, list[Need]]:
    """Of a table's `messages`, by what a device is sent: what of its own, to that sender, has arrived there,
    as the sender needed it before, and no earlier message told so. Of both what was made: forward or not, micro-batch,
    group."""
    found = dict[Need, list[Need]]()
    for (sender, receiver), channel in channels.items():
        back = deque(sorted(channels.get((receiver, sender), []), key=lambda message: message.before))
        for message in channel:
            while back and back[0].before <= message.after:
                arrived = back.popleft()
                found.setdefault(message.made, []).append(arrived.made)
    return found


def embedding_rows(table: Table) -> dict[int, list[int]]:
    """Of an embedding that the first group shares with the last one on another device: by position in that device's
    row, of which micro-batches it takes the first one's rows of the gradient after the step.

    What the first group's backward needs of that device is done by then, and as many steps more as a gradient takes to
    the first: so nobody waits for ever, and mostly not at all. Micro-batches that are in no list come after the row.
    Nothing where both groups are on one device.
    """
    (first, chunk), last = table.holder(0), table.holder(table.groups - 1)[0]
    if first == last:
        return {}
    way, found = 2 * (table.stages - 1), dict[int, list[int]]()
    done, needed = [0] * table.stages, [0] * table.stages  # steps of the last device that a device's own steps need
    given: dict[Need, int] = {}
    for device, step in walk(table):
        done[device] += 1
        needed[device] = max([needed[device], *(given[need] for need in needs(table, device, step))])
        if device == last:
            needed[device] = done[device]
        given |= dict.fromkeys(gives(table, device, step), needed[device])
        if device == first:
            for part in step.parts:
                if part.kind in ("B", "BW") and part.chunk == chunk:
                    found.setdefault(needed[device] - 1 + way, []).append(part.micro_batch)
    return {at: numbers for at, numbers in found.items() if at < len(table.rows[last])}


def _uses(table: Table) -> list[tuple[int, int, Need]]:
    return [
        (device, index, need)
        for device, row in enumerate(table.rows)
        for index, step in enumerate(row)
        for need in needs(table, device, step)
    ]
