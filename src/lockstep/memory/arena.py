"""The static arena: an offset for every buffer of a program, so that buffers that are alive together never overlap.

Offsets of intervals in a strip (dynamic storage allocation) cannot be chosen best in polynomial time; what
programs of this kind look like helps. Long-lived buffers (activations that the backward pass needs, gradients) are
laid out first, in the order of time, where they form stacks; the short-lived ones then take the gaps. Where few
buffers make it cheap, largest-first is tried as well (Pisarchyk and Lee, arXiv 2001.03288). The best plan wins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

_CLOSE = 1.01
"""Peak over lower bound at which no further order is tried."""
_SHARES = (0.02, 0.005, 0.1, 0.3, 1.0)
"""Parts of the program's length that a long-lived buffer is alive for at least; 1.0: all are short-lived."""
_FEW = 700
"""Buffers up to which largest-first is tried: its work grows with the square."""
_END = 1 << 62
"""An address above every arena."""


@dataclass(frozen=True)
class Buffer:
    """Memory of `size` bytes that is alive from step `first` to step `last`, both included."""

    size: int
    first: int
    last: int
    align: int = 64


@dataclass(frozen=True)
class Arena:
    """offsets: bytes from the arena's beginning, one per buffer in the given order. peak: its size in bytes."""

    offsets: tuple[int, ...]
    peak: int


def plan(buffers: Sequence[Buffer]) -> Arena:
    """Offsets for all buffers with a small peak: at most 5 % above `lower_bound` on the graphs of training steps."""
    bound = lower_bound(buffers)
    best: Arena | None = None
    for arena in _attempts(buffers):
        if best is None or arena.peak < best.peak:
            best = arena
        if best.peak <= _CLOSE * bound:
            break
    return best or Arena((), 0)


def lower_bound(buffers: Sequence[Buffer]) -> int:
    """The most bytes alive at one step: no plan has a smaller peak."""
    steps: dict[int, int] = {}
    for b in buffers:
        steps[b.first] = steps.get(b.first, 0) + b.size
        steps[b.last + 1] = steps.get(b.last + 1, 0) - b.size
    most = alive = 0
    for step in sorted(steps):
        alive += steps[step]
        most = max(most, alive)
    return most


def without_reuse(buffers: Sequence[Buffer]) -> int:
    """The bytes that all buffers take where each has memory of its own."""
    end = 0
    for b in buffers:
        end = _up(end, b.align) + b.size
    return end


def _attempts(buffers: Sequence[Buffer]) -> Iterable[Arena]:
    if len(buffers) <= _FEW:
        yield _largest_first(buffers, [(-b.size, b.first) for b in buffers])
        yield _largest_first(buffers, [(-b.size * (b.last - b.first + 1), b.first) for b in buffers])
    length = max((b.last for b in buffers), default=0) + 1
    for share in _SHARES:
        yield _long_first(buffers, int(share * length))


def _long_first(buffers: Sequence[Buffer], threshold: int) -> Arena:
    """Buffers that live longer than the threshold in the order of time, then the others between them."""
    offsets = [0] * len(buffers)
    long = [i for i, b in enumerate(buffers) if b.last - b.first > threshold and b.size]
    short = [i for i, b in enumerate(buffers) if b.last - b.first <= threshold and b.size]
    _sweep(buffers, long, offsets, [])
    _sweep(buffers, short, offsets, long)
    return Arena(tuple(offsets), _peak(buffers, offsets))


def _sweep(buffers: Sequence[Buffer], chosen: list[int], offsets: list[int], placed: list[int]) -> None:
    """Give the chosen buffers offsets in the order of their first step, clear of those in `placed`."""
    strip = _Strip(sorted((buffers[i].first, buffers[i].last, offsets[i], buffers[i].size) for i in placed))
    for i in sorted(chosen, key=lambda i: (buffers[i].first, -buffers[i].size)):
        b = buffers[i]
        strip.advance(b.first)
        offsets[i] = _smallest(b, _without(strip.free, strip.soon(b.last)))
        strip.take(offsets[i], b.size, b.last)


class _Strip:
    """The free ranges of the strip while time goes on. coming: (first, last, offset, size) of buffers that already
    have a place, by first."""

    def __init__(self, coming: Sequence[tuple[int, int, int, int]]) -> None:
        self.free: list[tuple[int, int]] = [(0, _END)]
        """Free ranges (start, end), in order, none touching the next."""
        self._coming, self._next = coming, 0
        self._ends: list[tuple[int, int, int]] = []

    def advance(self, step: int) -> None:
        """Go to a step: what ended before it is free, what has a place and began is taken."""
        while self._next < len(self._coming) and self._coming[self._next][0] <= step:
            first, last, offset, size = self._coming[self._next]
            self._release(first)
            self.take(offset, size, last)
            self._next += 1
        self._release(step)

    def soon(self, last: int) -> list[tuple[int, int]]:
        """Ranges (start, end) of buffers with a place that begin after now and until `last`, in order."""
        at = self._next
        while at < len(self._coming) and self._coming[at][0] <= last:
            at += 1
        return sorted((offset, offset + size) for _, _, offset, size in self._coming[self._next : at])

    def take(self, offset: int, size: int, last: int) -> None:
        """Take a free range until the step `last`."""
        at = bisect_right(self.free, (offset, _END)) - 1
        start, end = self.free[at]
        left = [(start, offset)] if start < offset else []
        right = [(offset + size, end)] if offset + size < end else []
        self.free[at : at + 1] = left + right
        heappush(self._ends, (last, offset, size))

    def _release(self, step: int) -> None:
        while self._ends and self._ends[0][0] < step:
            _, start, size = heappop(self._ends)
            end = start + size
            at = bisect_right(self.free, (start, end))
            before = at > 0 and self.free[at - 1][1] == start
            after = at < len(self.free) and self.free[at][0] == end
            low = self.free[at - 1][0] if before else start
            high = self.free[at][1] if after else end
            self.free[at - before : at + after] = [(low, high)]


def _without(free: Sequence[tuple[int, int]], taken: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """What is left of free ranges outside taken ones; both in order."""
    if not taken:
        yield from free
        return
    for start, end in free:
        for low, high in taken:
            if high <= start or low >= end:
                continue
            if low > start:
                yield start, low
            start = max(start, high)
        if start < end:
            yield start, end


def _smallest(b: Buffer, free: Iterable[tuple[int, int]]) -> int:
    """The start of the smallest free range that holds b; the last one has no end."""
    best, least = 0, _END + 1
    for start, end in free:
        aligned = _up(start, b.align)
        if b.size <= end - aligned and end - start < least:
            best, least = aligned, end - start
    return best


def _largest_first(buffers: Sequence[Buffer], keys: Sequence[tuple[int, int]]) -> Arena:
    offsets = [0] * len(buffers)
    placed: list[int] = []
    for i in sorted(range(len(buffers)), key=lambda i: keys[i]):
        b = buffers[i]
        together = (j for j in placed if buffers[j].first <= b.last and b.first <= buffers[j].last)
        offsets[i] = _smallest(b, _gaps(sorted((offsets[j], offsets[j] + buffers[j].size) for j in together)))
        placed.append(i)
    return Arena(tuple(offsets), _peak(buffers, offsets))


def _gaps(taken: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """What lies between taken ranges (by start, they may overlap), and above them."""
    end = 0
    for low, high in taken:
        if low > end:
            yield end, low
        end = max(end, high)
    yield end, _END


def _peak(buffers: Sequence[Buffer], offsets: Sequence[int]) -> int:
    return max((offset + b.size for offset, b in zip(offsets, buffers, strict=True)), default=0)


def _up(value: int, align: int) -> int:
    return -(-value // align) * align
