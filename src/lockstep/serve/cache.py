"""Pages for sequences: what the pool and the radix cache do together when one begins, grows, commits, leaves."""

from __future__ import annotations

from lockstep.ops import PAGE
from lockstep.serve.pool import PagePool
from lockstep.serve.radix import RadixCache
from lockstep.serve.sequence import Sequence


class Cache:
    """At every moment: used + free + evictable = total (`check` asserts it)."""

    def __init__(self, pages: int, prefix_cache: bool = True) -> None:
        self.pool = PagePool(pages)
        self.radix = RadixCache()
        self.prefix_cache = prefix_cache

    @property
    def total(self) -> int:
        return self.pool.total

    @property
    def used(self) -> int:
        """Pages that a running sequence reads or writes."""
        return self.total - self.available

    @property
    def available(self) -> int:
        """Pages that are free or could be evicted."""
        return self.pool.free + self.radix.evictable

    def reusable(self, sequence: Sequence) -> int:
        """Pages that the tree holds of the sequence's prefix. One token is always left to be computed."""
        return len(self.radix.match(self._wanted(sequence), sequence.salt)[1])

    def begin(self, sequence: Sequence) -> None:
        """Give the sequence the pages of its longest known prefix."""
        node, pages = self.radix.match(self._wanted(sequence), sequence.salt)
        self.radix.lock(node)
        sequence.node, sequence.pages, sequence.shared = node, pages, len(pages)
        sequence.computed = len(pages) * PAGE
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed

    def reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Make sure the sequence has pages for its first `tokens` tokens. False: there are not enough."""
        missing = -(-tokens // PAGE) - len(sequence.pages)
        if missing <= 0:
            return True
        if missing > self.available:
            return False
        if missing > self.pool.free:
            self.pool.give_back(self.radix.evict(missing - self.pool.free))
        sequence.pages += self.pool.take(missing)
        return True

    def commit(self, sequence: Sequence) -> None:
        """Let the tree have the sequence's computed full pages, generated tokens included."""
        full = sequence.computed // PAGE
        if not self.prefix_cache or full <= sequence.shared:
            return
        assert sequence.node is not None
        own = sequence.pages[:full]
        node, kept = self.radix.insert(sequence.keys(full), own, sequence.salt)
        self.radix.lock(node)
        self.radix.unlock(sequence.node)
        # The sequence reads the kept pages before its duplicates go back to the pool.
        sequence.pages[:full], sequence.node, sequence.shared = kept, node, full
        self.pool.give_back([mine for mine, tree in zip(own, kept, strict=True) if mine != tree])

    def release(self, sequence: Sequence) -> None:
        """The sequence reads nothing any more; what the tree has of it stays until it is evicted."""
        if sequence.node is None:
            return
        self.radix.unlock(sequence.node)
        self.pool.give_back(sequence.pages[sequence.shared :])
        sequence.node, sequence.pages, sequence.shared, sequence.computed = None, [], 0, 0

    def clear(self) -> None:
        """Forget every page that nobody reads."""
        self.pool.give_back(self.radix.evict(self.radix.evictable))

    def check(self, running: list[Sequence]) -> None:
        """Assert the invariant against the sequences that hold pages."""
        own = sum(len(s.pages) - s.shared for s in running)
        assert own + self.radix.locked == self.used, (own, self.radix.locked, self.used)
        assert self.pool.free + self.radix.pages + own == self.total
        assert len({page for s in running for page in s.pages[s.shared :]}) == own

    def _wanted(self, sequence: Sequence) -> list[tuple[int, ...]]:
        if not self.prefix_cache or sequence.reads_prompt:
            return []
        return sequence.keys((len(sequence.tokens) - 1) // PAGE)
