"""Who sends what to whom: the sends and receives that a table implies, in an order that needs no tags."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.parallel.schedules.dependencies import Need, gives, needs
from lockstep.parallel.schedules.table import Table


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


def _uses(table: Table) -> list[tuple[int, int, Need]]:
    return [
        (device, index, need)
        for device, row in enumerate(table.rows)
        for index, step in enumerate(row)
        for need in needs(table, device, step)
    ]
