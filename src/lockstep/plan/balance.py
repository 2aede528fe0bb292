"""Layers per stage, and what each stage recomputes: the fastest pipeline under the memory limit of every device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lockstep.errors import LockstepError
from lockstep.given import instance
from lockstep.parallel.schedules import StageTimes
from lockstep.plan.balance_exact import ExactBalance
from lockstep.plan.balance_problem import BalanceProblem, Keep, Layers
from lockstep.plan.balance_program import Solution, solve
from lockstep.plan.simulate import Simulation, simulate
from lockstep.quantities import counted


@dataclass(frozen=True)
class Balance:
    """The answer. ``counts[group][run][keep]``: layers of every run of ``problem.layers``, by the way they are kept.

    ``gap``: how much smaller the objective could be at most, relatively; 0 with one chunk per device, which is solved
    exactly, and above 0 if HiGHS ran out of time with several.
    """

    problem: BalanceProblem
    counts: tuple[tuple[tuple[int, ...], ...], ...]
    gap: float = 0.0

    @property
    def layers(self) -> list[int]:
        """Layers of every group, in model order; with one chunk per device, of every stage."""
        return [sum(map(sum, group)) for group in self.counts]

    def kept(self, name: str) -> list[int]:
        """Layers of every group that are kept in the way called ``name``, for example ``full`` recompute."""
        return [sum(n for keep, n in self._of(group) if keep.name == name) for group in range(self.problem.groups)]

    @cached_property
    def times(self) -> StageTimes:
        """Forward, backward and weight times, ``[device][chunk]``."""
        parts: tuple[Callable[[Keep], float], ...] = (lambda k: k.forward, lambda k: k.backward, lambda k: k.weight)
        f, b, w = (self._grid(part, ends) for part, ends in zip(parts, (1.0, 2.0, 0.0), strict=True))
        return StageTimes(f, b, w)

    @cached_property
    def objective(self) -> float:
        """(m - 1) x slowest stage + sum of all groups, which was minimised; see :func:`balance_program.solve`."""
        devices = [[sum(parts) for parts in zip(*rows, strict=True)] for rows in zip(*self._grids, strict=True)]
        slowest = [max(times) for times in zip(*devices, strict=True)]  # of every chunk
        if self.problem.table.placement == "loop":
            slowest = [max(slowest)] * self.problem.chunks
        return (self.problem.micro_batches - 1) * sum(slowest) + sum(map(sum, devices))

    @cached_property
    def simulation(self) -> Simulation:
        """The schedule run with these times."""
        return simulate(self.problem.table, self.times)

    @property
    def makespan(self) -> float:
        """Of the simulation."""
        return self.simulation.makespan

    @cached_property
    def peaks(self) -> list[float]:
        """Bytes of every device at its fullest."""
        table, peaks = self.problem.table, []
        for device, combinations in enumerate(self.problem.in_flight):
            groups = [table.group(device, chunk) for chunk in range(table.chunks)]
            fixed = sum(self._fixed_memory(group) for group in groups)
            acts = [sum(n * keep.activation for keep, n in self._of(group)) for group in groups]
            peaks.append(fixed + max(sum(h * a for h, a in zip(held, acts, strict=True)) for held in combinations))
        return peaks

    def __str__(self) -> str:
        title = f"{self.problem.depth} layers over {self.problem.groups} groups, makespan {self.makespan:g}"
        words = []
        for group, count in enumerate(self.layers):
            ways = ", ".join(f"{n} {keep.name}" for keep, n in self._of(group) if n)
            words.append(f"group {group}: {counted(count, 'layer')} ({ways})")
        return "\n".join([title, *words])

    @property
    def _grids(self) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
        return self.times.grids(self.problem.stages, self.problem.chunks)

    def _of(self, group: int) -> list[tuple[Keep, int]]:
        runs = zip(self.problem.layers, self.counts[group], strict=True)
        return [pair for run, counts in runs for pair in zip(run.keeps, counts, strict=False)]

    def _fixed_memory(self, group: int) -> float:
        runs = zip(self.problem.layers, self.counts[group], strict=True)
        memory = sum(run.parameters * sum(counts) for run, counts in runs)
        memory += self.problem.head.memory if group == 0 else 0.0
        return memory + (self.problem.tail.memory if group == self.problem.groups - 1 else 0.0)

    def _grid(self, part: Callable[[Keep], float], ends: float) -> list[list[float]]:
        table, rows = self.problem.table, []
        for device in range(table.stages):
            rows.append([self._time(table.group(device, chunk), part, ends) for chunk in range(table.chunks)])
        return rows

    def _time(self, group: int, part: Callable[[Keep], float], ends: float) -> float:
        time = sum(n * part(keep) for keep, n in self._of(group))
        time += ends * self.problem.head.time if group == 0 else 0.0
        return time + (ends * self.problem.tail.time if group == self.problem.groups - 1 else 0.0)


def balance(problem: BalanceProblem | Mapping[str, Any]) -> Balance:
    """The best balance. Raises :class:`LockstepError` that says by how many GB it does not fit, and what would fit."""
    if not isinstance(problem, BalanceProblem):
        problem = BalanceProblem.from_dict(instance(problem, Mapping, "balance: problem"))
    found = _solve(problem)
    if found is None:
        raise LockstepError(_why_not(problem))
    return _answer(problem, found)


def _solve(problem: BalanceProblem, elastic: bool = False) -> Solution | None:
    """Exact for one chunk per device, otherwise by HiGHS within a time limit."""
    if problem.chunks > 1:
        return solve(problem, elastic)
    exact = ExactBalance(problem)
    if elastic:
        return Solution(*exact.nearest())
    counts = exact.solve()
    return None if counts is None else Solution(counts, 0.0)


def _possible(problem: BalanceProblem) -> bool:
    """Whether some cut fits, as far as can be told in time."""
    nearest = _solve(problem, elastic=True)
    return nearest is not None and nearest.excess <= 1e-9 * problem.memory_limit


def _answer(problem: BalanceProblem, found: Solution) -> Balance:
    return Balance(problem, tuple(tuple(tuple(map(int, run)) for run in group) for group in found.counts), found.gap)


def _why_not(problem: BalanceProblem) -> str:
    nearest = _solve(problem, elastic=True)
    assert nearest is not None, "with memory for everything, any cut is a solution"
    peaks = _answer(problem, nearest).peaks
    worst = max(range(problem.stages), key=lambda device: peaks[device])
    said = (
        f"balance: no cut of {problem.depth} layers into {problem.groups} groups fits "
        f"{problem.memory_limit / 1e9:.3g} GB per device; the nearest needs {nearest.excess / 1e9:.3g} GB more, on "
        f"device {worst}."
    )
    fixes = [text for text, changed in _knobs(problem) if changed is not None and _possible(changed)]
    without = replace(problem, layers=tuple(map(_without_activations, problem.layers)))
    if not _possible(without):
        said += " Weights and optimizer state alone do not fit, so recompute cannot help; shard them (tp, fsdp)."
    return said + (
        f" Any one of these fits: {'; '.join(fixes)}." if fixes else " None of the other knobs alone fits it."
    )


def _knobs(problem: BalanceProblem) -> list[tuple[str, BalanceProblem | None]]:
    """What a user could change, each as a changed problem (None: not possible here)."""
    knobs: list[tuple[str, BalanceProblem | None]] = [
        ("micro-batches of half the size", problem.with_half_micro_batches()),
    ]
    most = problem.depth // max(1, problem.min_layers * problem.chunks)
    for stages in (problem.stages * 2, problem.stages * 4):
        knobs.append((f"{stages} stages", replace(problem, stages=stages) if stages <= most else None))
    fits_two = problem.depth >= 2 * problem.stages * problem.min_layers
    for name in ("v-half", "v-min"):
        other = replace(problem, schedule=name, chunks=2) if fits_two and problem.schedule != name else None
        knobs.append((f"the schedule {name}", other))
    return knobs


def _without_activations(run: Layers) -> Layers:
    return replace(run, keeps=tuple(replace(keep, activation=0.0) for keep in run.keeps))
