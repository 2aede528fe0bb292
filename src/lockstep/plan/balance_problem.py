"""What is balanced: the layers of a model, the ways to keep their activations, the pipeline and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lockstep.errors import LockstepError
from lockstep.parallel.schedules import Table, schedule


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
        if not self.layers or any(run.count < 1 or not run.keeps for run in self.layers):
            raise LockstepError(
                "balance: every entry of layers needs a count of at least 1 and at least one way to keep."
            )
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
        return schedule(self.schedule, self.stages, self.micro_batches, chunks=self.chunks)

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
        body = data["body"]
        keeps = [Keep("none", body["forward"], body["backward"], body["activation_mb"] * 1e6)]
        if "backward_full_recompute" in body:
            held = body["activation_full_recompute_mb"] * 1e6
            keeps.append(Keep("full", body["forward"], body["backward_full_recompute"], held))
        return BalanceProblem(
            stages=data["stages"],
            micro_batches=data["micro_batches"],
            layers=(Layers("body", body["layers"], body["parameters_mb"] * 1e6, tuple(keeps)),),
            memory_limit=data["memory_limit_mb"] * 1e6,
            head=End(data["head"]["time"], data["head"]["memory_mb"] * 1e6),
            tail=End(data["tail"]["time"], data["tail"]["memory_mb"] * 1e6),
            schedule=data.get("schedule", "1f1b"),
            chunks=data.get("chunks", 1),
        )


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
