"""Whose turn it is: clients that wait are served in proportion to what they were given so far.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each client has a
counter of the service it got, and the next request to start is of the client with the smallest. A client that comes
(back) starts at the smallest counter among the present ones: absence earns no credit. So a client with a flood of
requests waits for itself, and another one's request is next as soon as anything can start. A client with a larger share
is charged so much less for a token.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from itertools import groupby

from lockstep.serve.sequence import Sequence

_PROMPT, _GENERATED = 1, 2
"""Service of a token; the weights of the paper."""
_FEW = 64


class FairShare:
    """`join` and `leave` a sequence, `begin` and `grow` what it is given; `turns` orders those that wait."""

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        """shares: of clients that get more, or less, than 1."""
        self._shares = dict(shares or {})
        self._present: Counter[str] = Counter()
        """Sequences of each client, waiting and running."""
        self._given: dict[str, float] = {}

    def join(self, sequence: Sequence) -> None:
        client = sequence.client
        if not self._present[client]:
            self._given[client] = max(self._given.get(client, 0), self._least())
        self._present[client] += 1

    def leave(self, sequence: Sequence) -> None:
        self._present[sequence.client] -= 1
        if not self._present[sequence.client]:
            del self._present[sequence.client]
            self._forget()

    def begin(self, sequence: Sequence) -> None:
        """It starts: its prompt is given to its client, without what the cache had and what it was given before."""
        sequence.given = max(sequence.given, sequence.computed)
        self._give(sequence, len(sequence.tokens), _PROMPT)

    def grow(self, sequence: Sequence) -> None:
        """Tokens of it were computed; what is computed again after a preemption is not counted again."""
        self._give(sequence, sequence.computed, _GENERATED)

    def turns(self, waiting: list[Sequence]) -> Iterator[Sequence]:
        """Those that wait, in the order in which they may start; `begin` each that does before asking for the next.

        waiting: in order of priority, then arrival. A smaller priority goes first whoever it belongs to.
        """
        for _, same in groupby(list(waiting), key=lambda s: s.priority):
            queues: dict[str, deque[Sequence]] = {}
            for sequence in same:
                queues.setdefault(sequence.client, deque()).append(sequence)
            while queues:
                client = min(queues, key=lambda c: (self._given.get(c, 0), queues[c][0].uid))
                yield queues[client].popleft()
                if not queues[client]:
                    del queues[client]

    def _give(self, sequence: Sequence, upto: int, weight: int) -> None:
        if upto > sequence.given:
            cost = weight * (upto - sequence.given) / self._shares.get(sequence.client, 1.0)
            self._given[sequence.client] = self._given.get(sequence.client, 0.0) + cost
            sequence.given = upto

    def _least(self) -> float:
        return min((self._given[client] for client in self._present if self._present[client]), default=0)

    def _forget(self) -> None:
        """Absent clients whose counter is no more than what they would come back with, once there are many."""
        if len(self._given) > 2 * len(self._present) + _FEW:
            least = self._least() if self._present else max(self._given.values())
            self._given = {c: n for c, n in self._given.items() if c in self._present or n > least}
