"""Which tokens are computed next: continuous batching with chunked prefill, as values. No tensors here.

Each step has a budget of tokens, smaller while some sequence waits for its next token (`pace`). Running sequences that
decode come first, one token each, so long prompts never starve them; the rest of the budget goes to prefill, in chunks,
and to waiting sequences in order of priority, of what their clients were given (`fairness`), and of arrival. When pages
run out the newest running sequence goes back to the queue and is computed again later: by the bit contract that changes
nothing but time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lockstep.ops import PAGE
from lockstep.serve.cache import Cache
from lockstep.serve.drafting import Drafter, PromptLookup
from lockstep.serve.fairness import FairShare
from lockstep.serve.sequence import Sequence

_LEAST = 16
"""Tokens of prompts that a step reads beside those that are decoded, however long that takes: prompts go on too."""


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence, from position `start` on; `pages` is its page table."""

    sequence: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    samples: bool
    """The last row gives the next token."""
    drafts: int = 0
    """How many tokens at the end are guesses; the row before each tells whether it was right."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Step:
    """One forward pass. preempted: the sequences that lost their pages to it."""

    chunks: tuple[Chunk, ...] = ()
    preempted: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


class Scheduler:
    """Holds the waiting and the running sequences. `schedule` gives the next step, `advance` takes its result."""

    def __init__(
        self, cache: Cache, max_batch_tokens: int, max_running: int, drafts: int = 0, drafter: Drafter | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.cache = cache
        self.drafts = drafts
        self.drafter = PromptLookup() if drafter is None else drafter
        self.max_batch_tokens = max_batch_tokens
        self.max_running = min(max_running, max_batch_tokens)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._share = FairShare(shares)

    def add(self, sequence: Sequence) -> None:
        self._share.join(sequence)
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """The sequence is finished or aborted: its pages are free at once."""
        self._share.leave(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.cache.release(sequence)
        self.drafter.forget(sequence)

    def schedule(self, mixed: int | None = None) -> Step:
        """The next step; empty when nothing can run. mixed: its most tokens while some sequence decodes, where that is
        less than `max_batch_tokens`."""
        budget = self._budget(mixed)
        sizes: dict[int, int] = {}
        preempted: list[int] = []
        for sequence in sorted(self.running, key=lambda s: not s.decoding):
            if sequence in self.running:
                self._grow(sequence, sizes, preempted, budget)
        if not preempted:
            for sequence in self._admissible(budget - sum(sizes.values())):
                self._grow(sequence, sizes, preempted, budget)
        drafts = {} if preempted or not self.drafts else self._drafts(budget - sum(sizes.values()))
        chunks = (_chunk(s, sizes[s.uid], drafts.get(s.uid, [])) for s in self.running if sizes.get(s.uid))
        return Step(tuple(chunks), tuple(preempted))

    def advance(self, sequence: Sequence, count: int) -> None:
        """The next `count` tokens' keys and values are right: count them, and let the cache share full pages."""
        sequence.computed += count
        self._share.grow(sequence)
        self.cache.commit(sequence)

    def restart(self) -> None:
        """Keys and values have become wrong: every running sequence begins again, and the cache is empty."""
        for sequence in list(self.running):
            self._preempt(sequence)
        self.cache.clear()

    def _budget(self, mixed: int | None) -> int:
        decoding = sum(sequence.decoding for sequence in self.running)
        if mixed is None or not decoding:
            return self.max_batch_tokens
        return min(self.max_batch_tokens, max(mixed, decoding + _LEAST))

    def _grow(self, sequence: Sequence, sizes: dict[int, int], preempted: list[int], budget: int) -> None:
        """Give a running sequence its tokens of this step, and pages for them, taken from others if it must be."""
        size = min(sequence.remaining, budget - sum(sizes.values()))
        while size and not self.cache.reserve(sequence, sequence.computed + size):
            victim = self.running[-1]
            self._preempt(victim)
            sizes.pop(victim.uid, None)
            preempted.append(victim.uid)
            if victim is sequence:
                return
        sizes[sequence.uid] = size

    def _drafts(self, spare: int) -> dict[int, list[int]]:
        """Guesses for decoding sequences: what is left of the budget, and pages that nobody must give."""
        wishes = []
        for sequence in self.running:
            room = min(self.drafts, spare, sequence.limit - len(sequence.tokens) - 1)
            if room > 0 and sequence.decoding:
                wishes.append((sequence, room))
                spare -= room
        guesses = self.drafter.guess(wishes) if wishes else []
        return {
            sequence.uid: draft
            for (sequence, _), draft in zip(wishes, guesses, strict=True)
            if draft and self.cache.reserve(sequence, len(sequence.tokens) + len(draft))
        }

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.cache.release(sequence)
        insort(self.waiting, sequence, key=_order)
        self.preemptions += 1

    def _admissible(self, budget: int) -> Iterator[Sequence]:
        """Move waiting sequences to the running ones while there is room for their prompts."""
        if budget <= 0 or len(self.running) >= self.max_running:
            return
        for sequence in self._share.turns(self.waiting):
            if self._soon_known(sequence):
                continue
            self.cache.begin(sequence)
            # Room for the next token as well, where there is to be one.
            needed = -(-min(len(sequence.tokens) + 1, sequence.limit) // PAGE) - len(sequence.pages)
            if needed > self.cache.available - self._promised():
                self.cache.release(sequence)
                return
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_order)
            self._share.begin(sequence)
            budget -= min(budget, sequence.remaining)
            yield sequence
            if budget <= 0 or len(self.running) >= self.max_running:
                return

    def _promised(self) -> int:
        """Pages that running sequences still need for the tokens they have."""
        return sum(max(0, -(-len(s.tokens) // PAGE) - len(s.pages)) for s in self.running)

    def _soon_known(self, sequence: Sequence) -> bool:
        """A running sequence is just computing the next page of this one's prefix: wait for it."""
        if not self.cache.prefix_cache or sequence.reads_prompt:
            return False
        end = (self.cache.reusable(sequence) + 1) * PAGE
        if end >= len(sequence.tokens):
            return False
        wanted = sequence.tokens[:end]
        return any(
            s.computed < end <= len(s.tokens) and s.salt == sequence.salt and s.tokens[:end] == wanted
            for s in self.running
        )


def _order(sequence: Sequence) -> tuple[int, int]:
    """Smaller priority numbers first, then arrival."""
    return sequence.priority, sequence.uid


def _chunk(sequence: Sequence, size: int, draft: list[int]) -> Chunk:
    start, known = sequence.computed, sequence.computed + size
    tokens = (*sequence.tokens[start:known], *draft)
    pages = tuple(sequence.pages[: -(-(start + len(tokens)) // PAGE)])
    return Chunk(sequence.uid, start, tokens, pages, known == len(sequence.tokens), len(draft))
