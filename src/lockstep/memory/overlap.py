"""The overlap checker: whether an arena's plan is sound, by another way than that which made it.

The planner walks through time; this walks through addresses. At one address the buffers must be alive one after the
other, so their spans of time stand in a sorted list, and a new one is compared with its two neighbours only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from lockstep.memory.arena import Arena, Buffer


def check(buffers: Sequence[Buffer], arena: Arena) -> list[str]:
    """What is wrong with a plan, a line each; empty if it is sound."""
    faults = [fault for i, b in enumerate(buffers) for fault in _alone(i, b, arena)]
    return faults + _overlaps(buffers, arena.offsets)


def _alone(i: int, b: Buffer, arena: Arena) -> list[str]:
    offset, faults = arena.offsets[i], []
    if offset < 0 or offset + b.size > arena.peak:
        faults.append(f"buffer {i} at {offset} of {b.size} bytes is outside the arena of {arena.peak}")
    if offset % b.align:
        faults.append(f"buffer {i} at {offset} is not aligned to {b.align}")
    return faults


def _overlaps(buffers: Sequence[Buffer], offsets: Sequence[int]) -> list[str]:
    """Pairs that share an address and a step, as far as they are met before the first of them ends."""
    edges: list[tuple[int, bool, int]] = []  # (address, it begins here, buffer); at one address ends come first
    for i, b in enumerate(buffers):
        if b.size:
            edges += [(offsets[i], True, i), (offsets[i] + b.size, False, i)]
    spans: list[tuple[int, int, int]] = []  # (first, last, buffer) of those that cover the address, by first
    faults = []
    for _, begins, i in sorted(edges):
        span = (buffers[i].first, buffers[i].last, i)
        at = bisect_left(spans, span)
        if not begins:
            spans.pop(at)
            continue
        for first, last, other in spans[max(at - 1, 0) : at + 1]:
            if first <= span[1] and span[0] <= last:
                faults.append(f"buffers {min(i, other)} and {max(i, other)} overlap in memory and time")
        spans.insert(at, span)
    return faults
