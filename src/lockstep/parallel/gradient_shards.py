"""Gradients sharded over data-parallel ranks as they are made: ZeRO (arXiv 1910.02054) level 2.

The replicas work on neighbouring micro-batches at the same time, so what they exchange after a round adds up to few
sums of canonical groups and nodes of their tree, and each keeps only its runs of those. The additions are those of
`reduction` (contract C5).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lockstep.parallel.shards import Run, Shards, joined, unit_of
from lockstep.parallel.tree import NodeTree

Unit = tuple[str, str]
"""An axis that shares out, and what of it is exchanged together."""


class GradientShards:
    """The sum of a step's gradients, by runs. rounds: micro-batches of each replica. group: of a canonical group.

    In round i the replica at place r works on micro-batch ``i * size + r``. A unit's gradients are exchanged when all
    of them are there, on every replica in the same order. Of what few ranks share out (``shards.apart``), each has the
    gradients of several neighbours in a round.
    """

    def __init__(self, names: Iterable[str], shards: Shards, rounds: int, group: int = 1) -> None:
        self.shards = shards
        units: dict[Unit, list[str]] = {}
        for name in names:
            units.setdefault(self._unit(name), []).append(name)
        self._parts = {unit: shards.part(members).by_axis()[0] for unit, members in units.items()}
        leaves = rounds * shards.axis.size // group
        self._trees = {unit: NodeTree(leaves, group) for unit in units}
        self._waiting: dict[tuple[Unit, int], dict[str, Tensor]] = {}
        self._count = {unit: len(members) for unit, members in units.items()}

    def put(self, name: str, number: int, gradient: Tensor) -> None:
        """Give a gradient of a parameter, its ``number``-th one here; the shards own it from then on."""
        unit = self._unit(name)
        waiting = self._waiting.setdefault((unit, number), {})
        waiting[name] = gradient
        if len(waiting) == self._count[unit]:
            self._exchange(unit, number, self._waiting.pop((unit, number)))

    def _unit(self, name: str) -> Unit:
        return self.shards.axis_of(name).name, unit_of(name)

    def total(self) -> dict[Run, Tensor]:
        """The own runs of the sum over all micro-batches, in the shards' order."""
        found: dict[Run, Tensor] = {}
        for unit, part in self._parts.items():
            values = self._trees.pop(unit).total()
            found |= dict(zip(part.own, values.split([run.size for run in part.own]), strict=True))
        return {run: found[run] for run in self.shards.own}

    def _exchange(self, unit: Unit, number: int, gradients: dict[str, Tensor]) -> None:
        part = self._parts[unit]
        axis, share = part.axis, sum(run.size for run in part.own)
        each = self.shards.axis.size // axis.size  # micro-batches of a rank in a round
        first = number // each * self.shards.axis.size + number % each
        outgoing = [joined(part.read(gradients, run) for run in part.of(i)) for i in range(axis.size)]
        gradients.clear()
        incoming = [outgoing[i] if i == axis.index else torch.empty(share) for i in range(axis.size)]
        axis.exchange(outgoing, incoming)
        for i, values in enumerate(incoming):
            self._trees[unit].put(first + i * each, values)
