"""How many messages between stages a device holds at every step of its row: those that it sent or reads, and receives
that wait (``parallel.mailbox``)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from lockstep.parallel.schedules import AHEAD, Message, Need, Table, messages, told


def streams_held(table: Table) -> tuple[tuple[int, ...], ...]:
    """For every device and step, streams between groups and their gradients that are there beside what layers keep:
    what a group gave another device, until its backward (its own next group keeps it as its input); gradients that were
    sent, until what comes from there tells that they arrived; those that the step reads, also of its own next group;
    messages that came before their turn; receives that are posted."""
    channels, arrived = messages(table), told(table)
    return tuple(tuple(_held(table, device, channels, arrived)) for device in range(table.stages))


def _held(
    table: Table, device: int, channels: Mapping[tuple[int, int], Sequence[Message]], arrived: Mapping[Need, list[Need]]
) -> Iterator[int]:
    coming = {pair[0]: deque(found) for pair, found in channels.items() if pair[1] == device}
    needed, made = defaultdict[int, list[Message]](list), defaultdict[int, list[Message]](list)
    for (sender, receiver), channel in channels.items():
        for message in channel:
            if receiver == device:
                needed[message.before].append(message)
            elif sender == device:
                made[message.after].append(message)
    early, sent, own = set[Need](), set[Need](), set[Need]()
    for position, step in enumerate(table.rows[device]):
        for message in needed[position]:
            while message.made not in early:
                came = coming[message.sender].popleft()
                early.add(came.made)
                # A stream that a group gave is the end of its graph, wherever it has arrived.
                sent -= {one for one in arrived.get(came.made, ()) if not one.forward}
            early.remove(message.made)
        reads = sum(not message.forward for message in needed[position])
        sent |= {message.made for message in made[position] if message.forward}
        posted = sum(min(AHEAD, len(left)) for left in coming.values())
        yield len(sent) + len(own) + reads + posted + len(early)
        sent |= {message.made for message in made[position]}
        for part in step.parts:
            if part.kind in ("B", "BW"):
                group = table.group(device, part.chunk)
                sent.discard(Need(True, part.micro_batch, group))
                own.discard(Need(False, part.micro_batch, group + 1))
                if group and table.holder(group - 1)[0] == device:
                    own.add(Need(False, part.micro_batch, group))
