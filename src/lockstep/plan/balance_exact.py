"""The balance of one chunk per device, exactly: a dynamic program over the cuts, for every pace worth trying.

With one chunk a device's memory depends on its own layers only, so a cut is a path: stage i takes the layers from a to
b in its best way. For a given pace (the slowest stage allowed) the least sum of stages is the shortest path; the pace
rises from the first that is possible until the sum can no longer make up for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.plan.balance_problem import BalanceProblem

Floats = NDArray[np.float64]
Key = tuple[int, ...]  # how many layers of every type


class _Front(NamedTuple):
    """The ways to keep some layers that are worth considering: the faster, the more activations (bytes)."""

    time: Floats
    activation: Floats
    parent: NDArray[np.int64]  # the way to keep one layer less
    keep: NDArray[np.int64]  # how the added layer is kept


class ExactBalance:
    """All cuts of a problem with one chunk per device."""

    def __init__(self, problem: BalanceProblem) -> None:
        self.problem = problem
        self.types = list(dict.fromkeys((run.parameters, run.keeps) for run in problem.layers))
        self.run = [r for r, run in enumerate(problem.layers) for _ in range(run.count)]
        self.kind = [self.types.index((problem.layers[r].parameters, problem.layers[r].keeps)) for r in self.run]
        self.longest = problem.depth - (problem.stages - 1) * problem.min_layers
        self.fronts: dict[Key, _Front] = {}
        ends = np.zeros((2, problem.stages))
        for stage, end in ((0, problem.head), (problem.stages - 1, problem.tail)):
            ends[:, stage] += 3 * end.time, end.memory
        self.end_time, self.end_memory = ends
        self.held = np.array([float(combinations[0][0]) for combinations in problem.in_flight])

    def solve(self) -> list[list[list[int]]] | None:
        """``counts[group][run][keep]`` of the best cut; None if no cut fits."""
        least = self.path(np.inf)
        if least is None:
            return None
        paces = np.unique(self.times[np.isfinite(self.times)])
        low, high = 0, len(paces) - 1
        while low < high:  # the first pace that is possible
            middle = (low + high) // 2
            low, high = (low, middle) if self.path(paces[middle]) is not None else (middle + 1, high)
        ahead, best = self.problem.micro_batches - 1, None
        for pace in paces[low:]:
            if best is not None and ahead * pace + least[0] >= best[0]:
                break
            found = self.path(pace)
            assert found is not None
            if best is None or ahead * pace + found[0] < best[0]:
                best = ahead * pace + found[0], found[1]
        assert best is not None
        return self.counts(best[1])

    def nearest(self) -> tuple[list[list[list[int]]], float]:
        """The cut for which the limit must be raised least, and by how many bytes."""
        lengths = self.path(np.inf, elastic=True)
        assert lengths is not None, "there are enough layers for every stage"
        return self.counts(lengths[1], elastic=True), lengths[0]

    @cached_property
    def times(self) -> Floats:
        """``[stage, end, length]``: least time of the layers that end before ``end``; inf if they do not fit."""
        return self.table(self.best_times)

    @cached_property
    def excess(self) -> Floats:
        """``[stage, end, length]``: bytes over the limit with as few activations as possible."""
        limit = self.problem.memory_limit
        return self.table(lambda key: np.maximum(self.end_memory + self.least_memory(key) - limit, 0))

    def table(self, cell: Callable[[Key], Floats]) -> Floats:
        """One column of all stages per segment; equal segments are computed once."""
        depth, known = self.problem.depth, dict[Key, Floats]()
        found = np.full((self.problem.stages, depth + 1, self.longest + 1), np.inf)
        for begin in range(depth):
            key = [0] * len(self.types)
            for end in range(begin + 1, min(depth, begin + self.longest) + 1):
                key[self.kind[end - 1]] += 1
                if end - begin < self.problem.min_layers:
                    continue
                name = tuple(key)
                if name not in known:
                    known[name] = cell(name)
                found[:, end, end - begin] = known[name]
        return found

    def path(self, pace: float, elastic: bool = False) -> tuple[float, list[int]] | None:
        """The lengths of the stages with the least sum of times (``elastic``: the least largest excess)."""
        cost = self.excess if elastic else np.where(self.times <= pace, self.times, np.inf)
        depth, empty_allowed = self.problem.depth, self.problem.min_layers == 0
        before = np.arange(depth + 1)[:, None] - np.arange(self.longest + 1)
        reached = np.full(depth + 1, np.inf)
        reached[0] = 0.0
        chosen = []
        for stage in range(self.problem.stages):
            come = np.where(before >= 0, reached[np.maximum(before, 0)], np.inf)
            here = cost[stage].copy()
            if empty_allowed:
                here[:, 0] = 0.0 if elastic else self.end_time[stage]
            total = np.maximum(come, here) if elastic else come + here
            chosen.append(total.argmin(1))
            reached = total.min(1)
        if not np.isfinite(reached[depth]):
            return None
        lengths, end = [], depth
        for best in reversed(chosen):
            lengths.append(int(best[end]))
            end -= lengths[-1]
        return float(reached[depth]), lengths[::-1]

    def best_times(self, key: Key) -> Floats:
        which = self.fitting(key)
        return np.where(which < 0, np.inf, self.end_time + self.front(key).time[which])

    def fitting(self, key: Key) -> NDArray[np.int64]:
        """For every stage, the fastest way to keep these layers that fits; -1 if none does."""
        room = self.problem.memory_limit - self.end_memory - self.parameters(key)
        activations = self.front(key).activation  # falling
        allowed = room / self.held * (1 + 1e-12)
        first = len(activations) - np.searchsorted(activations[::-1], allowed, side="right")
        return np.where(first < len(activations), first, -1)

    def least_memory(self, key: Key) -> Floats:
        return self.parameters(key) + self.held * self.front(key).activation[-1]

    def parameters(self, key: Key) -> float:
        return sum(count * parameters for count, (parameters, _) in zip(key, self.types, strict=True))

    def front(self, key: Key) -> _Front:
        if key not in self.fronts:
            self.fronts[key] = self.extended(key)
        return self.fronts[key]

    def extended(self, key: Key) -> _Front:
        """The front of these layers from that of one layer less."""
        if not any(key):
            return _Front(np.zeros(1), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64))
        added, less = _one_less(key)
        shorter, keeps = self.front(less), self.types[added][1]
        time = np.add.outer(np.array([keep.time for keep in keeps]), shorter.time)
        activation = np.add.outer(np.array([keep.activation for keep in keeps]), shorter.activation)
        order = np.lexsort((activation.ravel(), time.ravel()))
        ordered = activation.ravel()[order]
        worth = np.r_[True, ordered[1:] < np.minimum.accumulate(ordered)[:-1]]  # less memory than all that are faster
        kept = order[worth]
        return _Front(time.ravel()[kept], activation.ravel()[kept], kept % time.shape[1], kept // time.shape[1])

    def counts(self, lengths: list[int], elastic: bool = False) -> list[list[list[int]]]:
        """The ways to keep of every stage, spread over its runs in order."""
        found, begin = [], 0
        for stage, length in enumerate(lengths):
            segment = range(begin, begin + length)
            key = tuple(sum(self.kind[i] == t for i in segment) for t in range(len(self.types)))
            which = len(self.front(key).time) - 1 if elastic else int(self.fitting(key)[stage])
            keeps = self.keeps_of(key, which)
            counts = [[0] * len(run.keeps) for run in self.problem.layers]
            for layer in segment:
                counts[self.run[layer]][keeps[self.kind[layer]].pop()] += 1
            found.append(counts)
            begin += length
        return found

    def keeps_of(self, key: Key, which: int) -> list[list[int]]:
        """For every type, how each of its layers is kept, along the front's parents."""
        found: list[list[int]] = [[] for _ in self.types]
        while any(key):
            front = self.front(key)
            added, key = _one_less(key)
            found[added].append(int(front.keep[which]))
            which = int(front.parent[which])
        return found


def _one_less(key: Key) -> tuple[int, Key]:
    """The last type present, and the key with one layer of it less."""
    last = max(t for t, count in enumerate(key) if count)
    return last, (*key[:last], key[last] - 1, *key[last + 1 :])
