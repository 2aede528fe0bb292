"""The best table of a small pipeline as a mixed-integer program: which of two steps of a device comes first."""

from __future__ import annotations

import itertools

import numpy as np

from lockstep.parallel.schedules import Step, Table
from lockstep.parallel.schedules.timing import latencies
from lockstep.plan.list_schedule import SLACK, Shape

Key = tuple[str, int, int]  # kind, micro-batch, group


class _Program:
    """Variables: the start of every step, whether one of two goes first, and the cost. Rows: ``low <= a . x``."""

    def __init__(self, shape: Shape, horizon: float, metric: str) -> None:
        self.shape, self.horizon, self.metric = shape, horizon, metric
        self.frame = shape.table([()] * shape.stages)
        m = range(shape.micro_batches)
        self.keys: list[Key] = [(kind, i, g) for kind in "FBW" for i in m for g in range(self.frame.groups)]
        self.start = {key: number for number, key in enumerate(self.keys)}
        self.first: dict[tuple[Key, Key], int] = {}
        self.size = len(self.keys)
        f, b, w = shape.times.grids(shape.stages, shape.chunks)
        self.took = {"F": f, "B": b, "W": w}
        self.rows: list[tuple[float, dict[int, float]]] = []
        self.add_dependencies()
        self.add_devices()
        self.cost = self.size
        self.size += 1
        self.add_cost()

    def length(self, key: Key) -> float:
        device, chunk = self.frame.holder(key[2])
        return self.took[key[0]][device][chunk]

    def after(self, later: Key, earlier: Key, lag: float = 0.0) -> None:
        """``later`` starts when ``earlier`` has ended."""
        self.rows.append((self.length(earlier) + lag, {self.start[later]: 1.0, self.start[earlier]: -1.0}))

    def add_dependencies(self) -> None:
        lag = latencies(self.frame, self.shape.comm)
        for kind, i, g in self.keys:
            device = self.frame.holder(g)[0]
            sources: list[Key] = {"F": [("F", i, g - 1)], "B": [("F", i, g), ("B", i, g + 1)], "W": [("B", i, g)]}[kind]
            for source in sources:
                if 0 <= source[2] < self.frame.groups:
                    self.after((kind, i, g), source, lag[self.frame.holder(source[2])[0]][device])
            if kind == "F" and i == 0 and 0 < g < self.shape.stages:
                # A device starts as soon as it can (it would look better by its span if it waited).
                sender = self.frame.holder(g - 1)[0]
                longest = -self.length(("F", 0, g - 1)) - lag[sender][device]
                self.rows.append((longest, {self.start["F", 0, g]: -1.0, self.start["F", 0, g - 1]: 1.0}))
            if i > 0:  # equal micro-batches keep their order, which loses nothing
                self.after((kind, i, g), (kind, i - 1, g))

    def add_devices(self) -> None:
        """Of two steps of a device whose order is not given, one is first; and every forward must find room."""
        for device in range(self.shape.stages):
            groups = {self.frame.group(device, chunk) for chunk in range(self.shape.chunks)}
            mine = [key for key in self.keys if key[2] in groups]
            for one, two in itertools.combinations(mine, 2):
                if not self.ordered(one, two):
                    self.add_pair(one, two)
            self.add_memory(device, mine)

    def ordered(self, one: Key, two: Key) -> bool:
        """Whether the dependencies within one group already say which is first."""
        (kind, i, g), (other, j, h) = one, two
        place = "FBW".index
        return g == h and (kind == other or (i - j) * (place(kind) - place(other)) >= 0)

    def add_pair(self, one: Key, two: Key) -> None:
        choice = self.first[one, two] = self.first[two, one] = self.size
        self.size += 1
        self.big_m(two, one, {choice: -1.0}, -1.0)  # choice = 1: one first
        self.big_m(one, two, {choice: 1.0}, 0.0)

    def big_m(self, later: Key, earlier: Key, choice: dict[int, float], shift: float) -> None:
        row = {self.start[later]: 1.0, self.start[earlier]: -1.0}
        row |= {number: sign * self.horizon for number, sign in choice.items()}
        self.rows.append((self.length(earlier) + shift * self.horizon, row))

    def precedes(self, one: Key, two: Key) -> tuple[float, dict[int, float]]:
        """1 if ``one`` is before ``two``, as a constant and coefficients of choices."""
        if (one, two) not in self.first:
            (kind, i, _), (other, j, _) = one, two
            return float((i, "FBW".index(kind)) <= (j, "FBW".index(other))), {}
        number = self.first[one, two]
        return (0.0, {number: 1.0}) if self.keys.index(one) < self.keys.index(two) else (1.0, {number: -1.0})

    def add_memory(self, device: int, mine: list[Key]) -> None:
        late, cap = self.shape.m_w, self.shape.cap[device] * self.shape.chunks * (1 + SLACK)
        change = {"F": 1.0, "B": late - 1.0, "W": -late}
        for this in (key for key in mine if key[0] == "F"):
            held, row = 1.0, dict[int, float]()
            for other in mine:
                if other != this:
                    constant, choices = self.precedes(other, this)
                    held += change[other[0]] * constant
                    for number, sign in choices.items():
                        row[number] = row.get(number, 0.0) - change[other[0]] * sign
            self.rows.append((held - cap, row))

    def add_cost(self) -> None:
        last = self.shape.micro_batches - 1
        for g in range(self.frame.groups):
            device = self.frame.holder(g)[0]
            row = {self.cost: 1.0, self.start["W", last, g]: -1.0}
            if self.metric == "max_span":
                begin = self.start["F", 0, self.frame.group(device, 0)]
                row[begin] = row.get(begin, 0.0) + 1.0
            self.rows.append((self.length(("W", last, g)), row))


def best_table(shape: Shape, best_known: float, horizon: float, metric: str, seconds: float) -> Table | None:
    """A table better than ``best_known`` by the metric, the best if there is time enough; None if none was found.

    ``horizon``: a makespan within which a best table surely ends.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import, and only needed here
    from scipy.sparse import coo_matrix

    program = _Program(shape, horizon, metric)
    entries = [(i, j, value) for i, (_, row) in enumerate(program.rows) for j, value in row.items()]
    i, j, values = zip(*entries, strict=True)
    matrix = coo_matrix((values, (i, j)), shape=(len(program.rows), program.size)).tocsr()
    low, high = np.zeros(program.size), np.full(program.size, horizon)
    integral = np.zeros(program.size)
    choices = sorted(set(program.first.values()))
    integral[choices], high[choices] = 1, 1
    high[program.cost] = best_known
    high[program.start["F", 0, 0]] = 0
    cost = np.zeros(program.size)
    cost[program.cost] = 1.0
    constraint = LinearConstraint(matrix, [low for low, _ in program.rows], np.inf)
    options = {"time_limit": seconds, "mip_rel_gap": 1e-6}
    found = milp(cost, constraints=constraint, integrality=integral, bounds=Bounds(low, high), options=options)
    if found.x is None:
        return None
    rows: list[list[tuple[float, int, Step]]] = [[] for _ in range(shape.stages)]
    for number, (kind, micro_batch, group) in enumerate(program.keys):
        device, chunk = program.frame.holder(group)
        rows[device].append((float(found.x[number]), number, Step(kind, micro_batch, chunk)))
    return shape.table([[step for _, _, step in sorted(row)] for row in rows])
