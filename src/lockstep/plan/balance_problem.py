"""What is balanced: the layers of a model, the ways to keep their activations, the pipeline and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lockstep.errors import LockstepError
from lockstep.given import instance, number, whole
from lockstep.parallel.schedules import Table
from lockstep.plan.refine import table_of


@dataclass(frozen=True)
class Keep:
    """One way to treat a layer's activations: keep all, recompute some or all, offload.

    Times of one micro-batch through one layer, with everything this way adds: ``forward``; ``backward``, the gradient
    of the input; ``weight``, that of the weights (0 if it is inside ``backward``). ``activation``: bytes that stay
    until the backward.
    """

    name: str
    forward: float
    backward: float
    activation: float
    weight: float = 0.0

    @property
    def time(self) -> float:
        """Of one micro-batch, all passes."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class Layers:
    """A run of ``count`` equal layers. ``parameters``: bytes of one layer with its gradients and optimizer state."""

    name: str
    count: int
    parameters: float
    keeps: tuple[Keep, ...]


@dataclass(frozen=True)
class End:
    """What the first (embedding) or last group (head, loss) has besides layers: ``time`` is added to its forward, twice
    that to its backward; ``memory`` in bytes."""

    time: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True)
class BalanceProblem:
    """Layers in the order of the model, to be cut into ``stages * chunks`` contiguous groups.

    Times in any one unit, memory in bytes. ``memory_limit``: of one device. ``schedule`` says how many micro-batches of
    activations each chunk of a device holds, and where the chunks are. ``min_layers``: of every group.
    """

    stages: int
    micro_batches: int
    layers: tuple[Layers, ...]
    memory_limit: float
    head: End = End()
    tail: End = End()
    schedule: str = "1f1b"
    chunks: int = 1
    min_layers: int = 1

    def __post_init__(self) -> None:
        _check(self)
        if not self.layers or not all(run.keeps for run in self.layers):
            raise LockstepError("balance: layers needs an entry, and every entry at least one way to keep.")
        most = self.depth // max(1, self.min_layers * self.chunks)
        if self.stages > most:
            raise LockstepError(
                f"balance: {self.depth} layers cannot fill {self.stages} stages x {self.chunks} chunks with "
                f"{self.min_layers} or more each. Use at most {most} stages."
            )

    @property
    def groups(self) -> int:
        """Number of layer groups."""
        return self.stages * self.chunks

    @property
    def depth(self) -> int:
        """Number of layers."""
        return sum(run.count for run in self.layers)

    @cached_property
    def table(self) -> Table:
        """The schedule's table, with which memory is counted and the result is simulated."""
        return table_of(self.schedule, self.stages, self.micro_batches, self.chunks)

    @cached_property
    def in_flight(self) -> list[list[tuple[int, ...]]]:
        """:func:`in_flight` of the table."""
        return in_flight(self.table)

    def with_half_micro_batches(self) -> BalanceProblem:
        """The same batch in twice as many micro-batches of half the size."""
        halves = tuple(replace(run, keeps=tuple(map(_halved, run.keeps))) for run in self.layers)
        head, tail = (replace(end, time=end.time / 2) for end in (self.head, self.tail))
        return replace(self, micro_batches=2 * self.micro_batches, layers=halves, head=head, tail=tail)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> BalanceProblem:
        """Reads the form of ``tests/oracles/balance_golden.json``: one kind of layer, memory in MB (1e6 bytes)."""
        try:
            body = data["body"]
            keeps = [Keep("none", body["forward"], body["backward"], _bytes(body, "activation_mb"))]
            if "backward_full_recompute" in body:
                held = _bytes(body, "activation_full_recompute_mb")
                keeps.append(Keep("full", body["forward"], body["backward_full_recompute"], held))
            return BalanceProblem(
                stages=data["stages"],
                micro_batches=data["micro_batches"],
                layers=(Layers("body", body["layers"], _bytes(body, "parameters_mb"), tuple(keeps)),),
                memory_limit=_bytes(data, "memory_limit_mb"),
                head=End(data["head"]["time"], _bytes(data["head"], "memory_mb")),
                tail=End(data["tail"]["time"], _bytes(data["tail"], "memory_mb")),
                schedule=data.get("schedule", "1f1b"),
                chunks=data.get("chunks", 1),
            )
        except KeyError as error:
            raise LockstepError(
                f"balance: the problem has no {error}; tests/oracles/balance_golden.json has all."
            ) from error
        except TypeError as error:
            raise LockstepError(f"balance: the problem is no mapping with body, head and tail: {error}.") from error


def _bytes(data: Mapping[str, Any], key: str) -> float:
    """Of a number in MB."""
    return number(data[key], f"balance: {key}") * 1e6


def _check(problem: BalanceProblem) -> None:
    """Raise LockstepError for a number that is none, or a part of another type."""
    for name in ("stages", "micro_batches", "chunks", "min_layers"):
        whole(getattr(problem, name), f"balance: {name}", least=0 if name == "min_layers" else 1)
    instance(problem.schedule, str, "balance: schedule")
    number(problem.memory_limit, "balance: memory_limit", above=True)
    for name in ("head", "tail"):
        end = instance(getattr(problem, name), End, f"balance: {name}")
        number(end.time, f"balance: {name}.time")
        number(end.memory, f"balance: {name}.memory")
    for run in instance(problem.layers, tuple, "balance: layers"):
        instance(run, Layers, "balance: an entry of layers")
        whole(run.count, f"balance: count of {run.name}")
        number(run.parameters, f"balance: parameters of {run.name}")
        for keep in instance(run.keeps, tuple, f"balance: keeps of {run.name}"):
            instance(keep, Keep, f"balance: a way to keep {run.name}")
            for name in ("forward", "backward", "activation", "weight"):
                number(getattr(keep, name), f"balance: {name} of {run.name}, {keep.name}")


def _halved(keep: Keep) -> Keep:
    return Keep(keep.name, keep.forward / 2, keep.backward / 2, keep.activation / 2, keep.weight / 2)


def in_flight(table: Table) -> list[list[tuple[int, ...]]]:
    """For every device, what it can hold at its fullest: micro-batches of each chunk, every combination that counts.

    Combinations below another one in every chunk are left out; more than one remains only with several chunks.
    """
    return [_fullest(table, device) for device in range(table.stages)]


def _fullest(table: Table, device: int) -> list[tuple[int, ...]]:
    now, seen = [0] * table.chunks, set()
    for step in table.rows[device]:
        for part in step.parts:
            now[part.chunk] += {"F": 1, "B": 0, "W": -1, "BW": -1}[part.kind]
            if part.kind == "F":
                seen.add(tuple(now))
    return sorted(a for a in seen if not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for b in seen))
