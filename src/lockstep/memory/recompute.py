"""What a backward pass computes again instead of keeping: a policy, and the choice that it makes for given values.

Recomputation runs the same operators on the same values, so it never changes a bit. Plain Python over numbers: the
compile pass fills in the values of a graph, the planner can fill in those of a model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

_CHEAP = 16.0
"""FLOPs per byte of a value below which computing it again is cheap: norms, gates, rotations, casts. A product has as
many as its depth. The ratio must not depend on the number of rows, for which a graph is not compiled again."""


@dataclass(frozen=True)
class RecomputePolicy:
    """mode `none`: keep whatever the backward pass reads. `selective`: compute again what costs little (Korthikanti et
    al., arXiv 2205.05198), keep products and attention. `full`: keep inputs only. `budget`: keep at most
    `budget_bytes`, giving up first what costs the fewest FLOPs per byte."""

    mode: Literal["none", "selective", "full", "budget"] = "none"
    budget_bytes: int = 0


@dataclass(frozen=True)
class Value:
    """A value of the forward pass. size: bytes that keeping it costs (0: an input). sources: indices of the values
    that it is computed from. flops: to compute it. again: whether it may be computed again. needed: whether the
    backward pass reads it."""

    size: int
    sources: tuple[int, ...]
    flops: float = 0.0
    again: bool = True
    needed: bool = False


def choose(policy: RecomputePolicy, values: Sequence[Value]) -> frozenset[int]:
    """The values to compute again. Those whose recomputation would free no memory are left out."""
    able = [i for i, value in enumerate(values) if value.again]
    if policy.mode == "none":
        return frozenset()
    if policy.mode == "selective":
        able = [i for i in able if values[i].flops < _CHEAP * values[i].size]
    elif policy.mode == "budget":
        able = _within(policy.budget_bytes, able, values)
    return _useful(set(able), values)


def kept_bytes(values: Sequence[Value], again: Collection[int]) -> int:
    """The bytes that live from the forward to the backward pass when `again` is computed again."""
    return sum(values[i].size for i in _reached(values, again) if i not in again)


def recomputed_flops(values: Sequence[Value], again: Collection[int]) -> float:
    """The FLOPs that the backward pass has on top."""
    return sum(values[i].flops for i in _reached(values, again) if i in again)


def _reached(values: Sequence[Value], again: Collection[int]) -> set[int]:
    """What the backward pass reads or computes again."""
    pending = [i for i, value in enumerate(values) if value.needed]
    seen = set(pending)
    while pending:
        i = pending.pop()
        if i in again:
            new = [source for source in values[i].sources if source not in seen]
            seen.update(new)
            pending.extend(new)
    return seen


def _within(budget: int, able: list[int], values: Sequence[Value]) -> list[int]:
    """The shortest run of values, cheapest per byte first, whose recomputation leaves at most the budget; or, where
    none does, the one that leaves least."""
    able = sorted(able, key=lambda i: (values[i].flops / max(values[i].size, 1), i))
    best, least = 0, kept_bytes(values, ())
    for count in range(len(able) + 1):
        kept = kept_bytes(values, set(able[:count]))
        if kept < least:
            best, least = count, kept
        if kept <= budget:
            return able[:count]
    return able[:best]


def _useful(again: set[int], values: Sequence[Value]) -> frozenset[int]:
    """Without the members that are not reached, or that free nothing; the most costly are looked at first."""
    again &= _reached(values, again)
    kept = kept_bytes(values, again)
    for i in sorted(again, key=lambda i: (-values[i].flops, -i)):
        less = again - {i}
        now = kept_bytes(values, less)
        if now <= kept:
            again, kept = less, now
    return frozenset(again & _reached(values, again))
