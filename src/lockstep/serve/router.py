"""Which replica gets a request: the one that has computed most of its prefix, unless that one is far busier.

Plain Python over integers. It remembers what it sent where, by the hash of each prefix of whole blocks; a replica may
have evicted a prefix meanwhile, which costs time and nothing else. Every replica gives the same bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence

BLOCK = 64
"""Tokens by which prefixes grow, as KV pages do."""
_SLACK = 8
_RATIO = 1.5
"""A replica with more than _SLACK requests and more than _RATIO times as many above the idlest loses its claim."""


class Router:
    """Remembers up to `memory` prefixes of each replica, the least recently used ones go first."""

    def __init__(self, memory: int = 2**16) -> None:
        self._memory = memory
        self._known: dict[int, OrderedDict[int, None]] = {}

    def choose(self, tokens: Sequence[int], salt: Hashable, loads: Mapping[int, int]) -> int:
        """One of the replicas in `loads` (the requests each is running), the most of the prefix first, then the least
        load, then the lowest number."""
        prefixes = list(_prefixes(tokens, salt))
        best = max(loads, key=lambda replica: (self._depth(replica, prefixes), -loads[replica], -replica))
        idlest = min(loads, key=lambda replica: (loads[replica], replica))
        ahead = loads[best] - loads[idlest]
        if ahead > _SLACK and loads[best] > _RATIO * loads[idlest]:
            best = idlest
        self._remember(best, prefixes)
        return best

    def forget(self, replica: int) -> None:
        """Its cache is empty: it was started again, or has new weights."""
        self._known.pop(replica, None)

    def _depth(self, replica: int, prefixes: Sequence[int]) -> int:
        known: Mapping[int, None] = self._known.get(replica, {})
        return next((i for i, prefix in enumerate(prefixes) if prefix not in known), len(prefixes))

    def _remember(self, replica: int, prefixes: Iterable[int]) -> None:
        known = self._known.setdefault(replica, OrderedDict())
        for prefix in prefixes:
            known[prefix] = None
            known.move_to_end(prefix)
        while len(known) > self._memory:
            known.popitem(last=False)


def _prefixes(tokens: Sequence[int], salt: Hashable) -> Iterable[int]:
    """The hashes of the prefixes of one, two, ... blocks."""
    state = hash(salt)
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        state = hash((state, *tokens[end - BLOCK : end]))
        yield state
