"""How many messages between stages a device holds at every step of its row: those that it sent or reads, and receives
that wait (``parallel.mailbox``)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from lockstep.parallel.schedules import AHEAD, Message, Need, Table, embedding_rows, messages, told
from lockstep.plan.refine import table_of


class Held(NamedTuple):
    """streams: between groups, and their gradients. rows: messages with rows of a tied embedding's gradient that came,
    or may come, to the last stage."""

    streams: int
    rows: int


@lru_cache(maxsize=1024)
def streams_held(name: str, stages: int, micro_batches: int, chunks: int, tied: bool, device: int) -> tuple[Held, ...]:
    """For every step of a device, streams between groups and their gradients that are there beside what layers keep:
    what a group gave another device, until its backward (its own next group keeps it as its input); gradients that were
    sent, until what comes from there tells that they arrived; those that the step reads, also of its own next group;
    messages that came before their turn; receives that are posted.

    Many layouts share a table, here by what `table_of` takes, and their sizes do not matter. tied: whether the first
    group sends rows of the embedding's gradient to the last one's device.
    """
    table = table_of(name, stages, micro_batches, chunks)
    return tuple(_held(table, device, *_sent(name, stages, micro_batches, chunks, tied)))


_Channels = Mapping[tuple[int, int], Sequence[Message]]


@lru_cache(maxsize=16)
def _sent(
    name: str, stages: int, micro_batches: int, chunks: int, tied: bool
) -> tuple[_Channels, Mapping[Need, list[Need]]]:
    """Of all devices of a table: by sender and receiver their messages, and what each message tells has arrived."""
    table = table_of(name, stages, micro_batches, chunks)
    arrived = told(channels := messages(table))
    if tied:
        for message in _rows(table):
            channels.setdefault((message.sender, message.receiver), []).append(message)
    for channel in channels.values():
        channel.sort(key=lambda message: message.after)
    return channels, arrived


def _rows(table: Table) -> Iterator[Message]:
    """The rows of a tied embedding's gradient as messages; they are what nobody needs else, the first group's."""
    (first, chunk), last = table.holder(0), table.holder(table.groups - 1)[0]
    taken = {m: at + 1 for at, numbers in embedding_rows(table).items() for m in numbers}
    for after, step in enumerate(table.rows[first]):
        for part in step.parts if first != last else ():
            if part.kind in ("B", "BW") and part.chunk == chunk:
                before = taken.get(part.micro_batch, len(table.rows[last]))
                yield Message(False, part.micro_batch, 0, first, last, after, before)


def _is_rows(made: Need) -> bool:
    return not made.forward and made.group == 0


def _held(table: Table, device: int, channels: _Channels, arrived: Mapping[Need, list[Need]]) -> Iterator[Held]:
    coming = {pair[0]: deque(found) for pair, found in channels.items() if pair[1] == device}
    needed, made = defaultdict[int, list[Message]](list), defaultdict[int, list[Message]](list)
    for (sender, receiver), channel in channels.items():
        if receiver == device:
            for message in channel:
                needed[message.before].append(message)
        elif sender == device:
            for message in channel:
                if not _is_rows(message.made):
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
        reads = sum(not message.forward and not _is_rows(message.made) for message in needed[position])
        sent |= {message.made for message in made[position] if message.forward}
        ahead = [message.made for left in coming.values() for message in islice(left, AHEAD)] + list(early)
        rows = sum(map(_is_rows, ahead))
        yield Held(len(sent) + len(own) + reads + len(ahead) - rows, rows)
        sent |= {message.made for message in made[position]}
        for part in step.parts:
            if part.kind in ("B", "BW"):
                group = table.group(device, part.chunk)
                sent.discard(Need(True, part.micro_batch, group))
                own.discard(Need(False, part.micro_batch, group + 1))
                if group and table.holder(group - 1)[0] == device:
                    own.add(Need(False, part.micro_batch, group))
