"""The balance as a mixed-integer program for HiGHS; with several chunks, whose groups share a device's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import LockstepError
from lockstep.plan.balance_problem import BalanceProblem, End, Keep

_INFEASIBLE = 2  # scipy's status


@dataclass(frozen=True)
class Solution:
    """``counts[group][run][keep]`` layers; ``excess``: bytes over the limit that had to be allowed; ``gap``: relative
    distance to what is proven to be impossible."""

    counts: Sequence[Sequence[Sequence[int]]]
    excess: float
    gap: float = 0.0


class _Rows:
    """Constraints ``low <= coefficients . x <= high``, collected one by one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.coefficients: list[NDArray[np.float64]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, low: float, high: float, *parts: tuple[Any, Any]) -> None:
        """Each part: index (or indices) into x, and its coefficient(s)."""
        row = np.zeros(self.size)
        for where, value in parts:
            row[where] += value
        self.coefficients.append(row)
        self.low.append(low)
        self.high.append(high)


def solve(problem: BalanceProblem, elastic: bool = False, seconds: float = 5.0) -> Solution | None:
    """The best counts, or None if there are none under the limit.

    Minimises (m - 1) x slowest stage + sum of all groups: the time of a pipeline whose slowest stage sets the pace,
    filled and drained once. With chunks, that is the sum over the chunks of the slowest group: of each chunk in the V
    placement, whose devices do the same chunk at the same time; of all groups otherwise.
    ``elastic``: instead, minimises how far the limit must be raised.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import, and only needed here

    layout = _Layout(problem)
    rows = _Rows(layout.size)
    _add_counts(rows, layout)
    _add_order(rows, layout)
    _add_time(rows, layout)
    _add_memory(rows, layout, elastic)
    cost = np.zeros(layout.size)
    if elastic:
        cost[layout.excess] = 1.0
    else:
        cost[layout.x.ravel()] = np.tile(layout.times.ravel(), problem.groups)
        np.add.at(cost, [layout.slowest[chunk] for chunk in range(problem.chunks)], problem.micro_batches - 1)
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows.coefficients), rows.low, rows.high),
        integrality=layout.integral,
        bounds=Bounds(0, layout.upper),
        options={"time_limit": seconds, "mip_rel_gap": 1e-4},
    )
    if found.x is None:
        return None if found.status == _INFEASIBLE else _out_of_time(problem, seconds)
    counts = np.rint(found.x[layout.x]).astype(np.int64).tolist()
    return Solution(counts, float(found.x[layout.excess]) * problem.memory_limit, float(found.mip_gap))


def _out_of_time(problem: BalanceProblem, seconds: float) -> NoReturn:
    raise LockstepError(
        f"balance: no cut of {problem.depth} layers into {problem.groups} groups was found within {seconds:g} s, "
        f"though there may be one. Give more memory per device, fewer chunks, or fewer kinds of layers."
    )


class _Layout:
    """Which entry of the program's vector is what. Times are scaled by the mean of a group, memory by the limit."""

    def __init__(self, problem: BalanceProblem) -> None:
        self.problem = problem
        groups, runs = problem.groups, len(problem.layers)
        self.keeps = max(len(run.keeps) for run in problem.layers)
        self.x = np.arange(groups * runs * self.keeps).reshape(groups, runs, self.keeps)
        self.complete = self.x.size + np.arange(groups * (runs - 1)).reshape(groups, runs - 1)
        paces = range(problem.chunks) if problem.table.placement == "v" else [0] * problem.chunks
        self.slowest = self.x.size + self.complete.size + np.array(paces)
        self.excess = int(self.slowest[-1]) + 1
        self.size = self.excess + 1
        self.times = self.table(lambda keep: keep.time)
        self.activations = self.table(lambda keep: keep.activation) / problem.memory_limit
        self.parameters = np.array([run.parameters for run in problem.layers]) / problem.memory_limit
        self.unit = sum(run.count * run.keeps[0].time for run in problem.layers) / groups or 1.0
        self.times /= self.unit
        self.integral = np.ones(self.size)
        self.integral[[*self.slowest, self.excess]] = 0
        self.upper = np.full(self.size, np.inf)
        self.upper[self.complete.ravel()] = 1
        for r, run in enumerate(problem.layers):
            self.upper[self.x[:, r, len(run.keeps) :]] = 0  # a run with fewer ways than others
            self.upper[self.x[:, r, : len(run.keeps)]] = run.count

    def table(self, of: Callable[[Keep], float]) -> NDArray[np.float64]:
        rows = [[of(keep) for keep in run.keeps] for run in self.problem.layers]
        return np.array([row + [0.0] * (self.keeps - len(row)) for row in rows])

    def ends(self, group: int) -> list[End]:
        """What a group has besides layers."""
        at = ((0, self.problem.head), (self.problem.groups - 1, self.problem.tail))
        return [end for place, end in at if place == group]


def _add_counts(rows: _Rows, layout: _Layout) -> None:
    for r, run in enumerate(layout.problem.layers):
        rows.add(run.count, run.count, (layout.x[:, r].ravel(), 1.0))
    for group in range(layout.problem.groups):
        rows.add(layout.problem.min_layers, np.inf, (layout.x[group].ravel(), 1.0))


def _add_order(rows: _Rows, layout: _Layout) -> None:
    """A group has layers of a later run only if the run before is complete at its end: cuts are contiguous."""
    for r, run in enumerate(layout.problem.layers[:-1]):
        following = layout.problem.layers[r + 1].count
        for group in range(layout.problem.groups):
            complete = layout.complete[group, r]
            rows.add(0.0, np.inf, (layout.x[: group + 1, r].ravel(), 1.0), (complete, -float(run.count)))
            rows.add(-np.inf, 0.0, (layout.x[group, r + 1], 1.0), (complete, -float(following)))


def _add_time(rows: _Rows, layout: _Layout) -> None:
    for group in range(layout.problem.groups):
        fixed = sum(3 * end.time for end in layout.ends(group)) / layout.unit
        _, chunk = layout.problem.table.holder(group)
        terms = (layout.x[group].ravel(), layout.times.ravel()), (layout.slowest[chunk], -1.0)
        rows.add(-np.inf, -fixed, *terms)


def _add_memory(rows: _Rows, layout: _Layout, elastic: bool) -> None:
    table = layout.problem.table
    for device, combinations in enumerate(layout.problem.in_flight):
        groups = [table.group(device, chunk) for chunk in range(table.chunks)]
        fixed = sum(end.memory for group in groups for end in layout.ends(group)) / layout.problem.memory_limit
        for held in combinations:
            each = [layout.parameters[:, None] + count * layout.activations for count in held]
            slack = (layout.excess, -1.0 if elastic else 0.0)
            rows.add(-np.inf, 1.0 - fixed, (layout.x[groups].ravel(), np.array(each).ravel()), slack)
