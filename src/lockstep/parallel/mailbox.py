"""The messages of one run of a pipeline table: what a stage sends, in the order of its steps, and what it awaits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.parallel.collectives import Axis
from lockstep.parallel.schedules import AHEAD, Table, messages, told
from lockstep.parallel.transport import Pending


class Letter(NamedTuple):
    """What a message carries. x: the residual stream that a group made; dx: the gradient that it made for the group
    before; tied: the embedding's gradient, for the last group, which owns the tied weight."""

    kind: Literal["x", "dx", "tied"]
    micro_batch: int
    group: int


def letters(table: Table, tied: bool) -> dict[tuple[int, int], list[Letter]]:
    """For every (sender, receiver), what is sent in which order: results of a step when it ends.

    tied: whether the first group sends the embedding's gradient to the last (if another device holds that).
    """
    found: dict[tuple[int, int], list[tuple[int, Letter]]] = {}
    for pair, sent in messages(table).items():
        found[pair] = [(m.after, Letter("x" if m.forward else "dx", m.micro_batch, m.group)) for m in sent]
    first, last = table.holder(0), table.holder(table.groups - 1)
    if tied and first[0] != last[0]:
        for after, step in enumerate(table.rows[first[0]]):
            for part in step.parts:
                if part.kind in ("B", "BW") and part.chunk == first[1]:
                    letter = Letter("tied", part.micro_batch, 0)
                    found.setdefault((first[0], last[0]), []).append((after, letter))
    # Stable: within a step, the activation goes before a gradient, and that before the embedding's.
    return {pair: [letter for _, letter in sorted(sent, key=lambda s: s[0])] for pair, sent in found.items()}


def settled(table: Table) -> dict[Letter, list[Letter]]:
    """By letter: what its receiver had sent to its sender that must have arrived, and no earlier letter told so."""
    return {
        Letter(_KIND[made.forward], made.micro_batch, made.group): [Letter(_KIND[f], m, group) for f, m, group in sent]
        for made, sent in told(messages(table)).items()
    }


_KIND: Mapping[bool, Literal["x", "dx"]] = {True: "x", False: "dx"}


class Mailbox:
    """Sends never wait for a receiver; a receive waits until its message is there.

    Both ends go through a pair's messages in the order of the sender's steps, which the table tells, so nothing needs
    an address. A tensor that is sent is kept until a message tells that it has arrived (settled), or until `close`.
    """

    def __init__(
        self,
        axis: Axis,
        order: dict[tuple[int, int], list[Letter]],
        shape: Callable[[Letter], tuple[int, ...]],
        settled: Mapping[Letter, Sequence[Letter]],
    ) -> None:
        self._axis, self._shape, self._settled = axis, shape, settled
        me = axis.index
        self._to = {letter: pair[1] for pair, sent in order.items() if pair[0] == me for letter in sent}
        self._expected = {pair[0]: deque(sent) for pair, sent in order.items() if pair[1] == me}
        self._from = {letter: source for source, sent in self._expected.items() for letter in sent}
        self._posted: dict[int, deque[tuple[Letter, Tensor, Pending]]] = {s: deque() for s in self._expected}
        self._arrived: dict[Letter, Tensor] = {}
        self._sending: dict[Letter, tuple[Tensor, Pending]] = {}
        for source in self._expected:
            self._post(source)

    def send(self, letter: Letter, tensor: Tensor) -> None:
        """Send to whoever the table says; a result that stays on this device is put aside for `take`."""
        if letter not in self._to:
            self._arrived[letter] = tensor
            return
        tensor = tensor.contiguous()
        self._sending[letter] = tensor, self._axis.send(tensor, self._to[letter])

    def take(self, letter: Letter) -> Tensor:
        """The message, when it is there."""
        while letter not in self._arrived:
            source = self._from[letter]
            arrived, tensor, pending = self._posted[source].popleft()
            pending.wait()
            self._arrived[arrived] = tensor
            self._sent(self._settled.get(arrived, ()))
            self._post(source)
        return self._arrived.pop(letter)

    def close(self) -> None:
        """Wait until everything that was sent is gone."""
        self._sent(list(self._sending))

    def _sent(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            self._sending.pop(letter)[1].wait()

    def _post(self, source: int) -> None:
        posted, expected = self._posted[source], self._expected[source]
        while expected and len(posted) < AHEAD:
            letter = expected.popleft()
            tensor = torch.empty(self._shape(letter), dtype=torch.float32)
            posted.append((letter, tensor, self._axis.receive(tensor, source)))
