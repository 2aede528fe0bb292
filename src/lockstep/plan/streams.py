"""How many messages between stages a device holds at every step of its row: those that it sent or reads, and receives
that wait (``parallel.mailbox``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from lockstep.parallel.schedules import AHEAD, Step, Table


class _Taken(NamedTuple):
    """The step that a message is for."""

    forward: bool
    group: int
    micro_batch: int


def streams_held(table: Table, device: int) -> Iterator[int]:
    """For every step, streams between groups and their gradients that are there beside what layers keep: what a group
    gave another device, until its backward (its own next group keeps it as its input); gradients that were sent, until
    what comes from there tells that they arrived; those that the step reads; messages that came before their turn;
    receives that are posted."""
    run = _Held(table, device)
    given = 0
    for step in table.rows[device]:
        reads = 0
        for part in step.parts:
            reads += run.takes(part)
            given += part.kind == "F" and run.goes_to(part) is not None
        yield given + reads + run.waiting
        for part in step.parts:
            if part.kind in ("B", "BW"):
                given -= run.goes_to(part._replace(kind="F")) is not None
                run.sends(part)


class _Held:
    """What a device's mailbox holds, step by step."""

    def __init__(self, table: Table, device: int) -> None:
        self.table, self.device = table, device
        own = [table.group(device, chunk) for chunk in range(table.chunks)]
        near = [table.holder(g + d)[0] for g in own for d in (-1, 1) if 0 <= g + d < table.groups]
        self.rows = {other: list(self._steps(other)) for other in dict.fromkeys(near) if other != device}
        self.place = {other: {made: i for i, made in row} for other, row in self.rows.items()}
        self.coming = {other: deque(self._coming(row)) for other, row in self.rows.items()}
        self.sent: dict[int, list[int]] = {other: [] for other in self.rows}
        """By receiver, the positions of its steps that read gradients that were sent."""
        self.early = set[_Taken]()

    @property
    def waiting(self) -> int:
        posted = sum(min(AHEAD, len(left)) for left in self.coming.values())
        return posted + len(self.early) + sum(map(len, self.sent.values()))

    def goes_to(self, step: Step) -> int | None:
        """The other device that a step's result goes to."""
        group = self.table.group(self.device, step.chunk) + (1 if step.kind == "F" else -1)
        if not 0 <= group < self.table.groups or (to := self.table.holder(group)[0]) == self.device:
            return None
        return to

    def takes(self, step: Step) -> int:
        """Take the message that a step needs. Returns how many gradients it reads; a stream is its group's input."""
        forward, group = step.kind == "F", self.table.group(self.device, step.chunk)
        source = group - 1 if forward else group + 1
        if step.kind == "W" or not 0 <= source < self.table.groups:
            return 0
        if (other := self.table.holder(source)[0]) != self.device:
            taken = _Taken(forward, group, step.micro_batch)
            while taken not in self.early:
                after, arrived = self.coming[other].popleft()
                self.early.add(arrived)
                self.sent[other] = [read for read in self.sent[other] if read > after]
            self.early.remove(taken)
        return int(not forward)

    def sends(self, step: Step) -> None:
        """Send the gradient that a step made."""
        if (to := self.goes_to(step)) is not None:
            group = self.table.group(self.device, step.chunk)
            self.sent[to].append(self.place[to][_Taken(False, group - 1, step.micro_batch)])

    def _steps(self, other: int) -> Iterator[tuple[int, _Taken]]:
        """Another device's steps with a result, by their position."""
        for position, step in enumerate(self.table.rows[other]):
            for part in step.parts:
                if part.kind != "W":
                    yield position, _Taken(part.kind == "F", self.table.group(other, part.chunk), part.micro_batch)

    def _coming(self, row: list[tuple[int, _Taken]]) -> Iterator[tuple[int, _Taken]]:
        """Of these steps, those whose result comes here: the step that it is for."""
        for position, (forward, group, micro_batch) in row:
            to = group + (1 if forward else -1)
            if 0 <= to < self.table.groups and self.table.holder(to)[0] == self.device:
                yield position, _Taken(forward, to, micro_batch)
