"""What a pass is: a rewrite of a graph that keeps every bit of its results and tells what it did."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import fx

from lockstep.memory.recompute import RecomputePolicy


@dataclass(frozen=True)
class PassContext:
    """What passes are told about a graph beyond its nodes.

    forward_outputs: how many leading outputs are results of the forward pass; what they do not need is backward.
    None: the graph has no backward part.
    recompute: what the backward part computes again.
    bucket_bytes: the size up to which collectives are joined.
    sums_by_element: whether the collectives' library adds every element over the ranks in one order, wherever it lies
    in a message (a binary tree over ranks does, a ring does not).
    """

    forward_outputs: int | None = None
    recompute: RecomputePolicy = field(default_factory=RecomputePolicy)
    bucket_bytes: int = 25 << 20
    sums_by_element: bool = False


@dataclass(frozen=True)
class Changes:
    """What a rewrite did. count: places changed. notes: lines for the report, among them why a place was declined."""

    count: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PassReport:
    """What a pass did to one graph. before and after: numbers of nodes that compute (inputs and outputs apart)."""

    name: str
    changed: int
    notes: tuple[str, ...]
    before: int
    after: int
    seconds: float


@dataclass(frozen=True)
class Pass:
    """A named rewrite. run: changes the graph in place and reports."""

    name: str
    run: Callable[[fx.GraphModule, PassContext], PassReport]

    @staticmethod
    def of(name: str, rewrite: Callable[[fx.GraphModule, PassContext], Changes]) -> Pass:
        """A pass from a rewrite: times it, counts nodes and checks the graph. Its code is left to `apply`."""

        def run(module: fx.GraphModule, context: PassContext) -> PassReport:
            begun, before = time.perf_counter(), computing(module.graph)
            changes = rewrite(module, context)
            if changes.count:
                module.graph.lint()
            seconds = time.perf_counter() - begun
            return PassReport(name, changes.count, changes.notes, before, computing(module.graph), seconds)

        return Pass(name, run)


def apply(module: fx.GraphModule, passes: Sequence[Pass], context: PassContext) -> tuple[PassReport, ...]:
    """Run passes in their order on one graph, in place."""
    module.meta["forward_outputs"] = context.forward_outputs
    reports = tuple(step.run(module, context) for step in passes)
    if any(report.changed for report in reports):
        module.recompile()  # once: it takes as long as the passes
    return reports


def computing(graph: fx.Graph) -> int:
    """The number of nodes that compute something."""
    return sum(node.op.startswith("call") for node in graph.nodes)
