"""Which layers, and so which parameters, each layer group of a pipeline holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.errors import LockstepError
from lockstep.parallel.schedules import Table

TIED = "embed.weight"
"""The parameter that the first and the last group share where the head is the embedding."""


@dataclass(frozen=True)
class Stages:
    """Layer groups in the order of the network; the first embeds, the last norms and has the head."""

    layers: tuple[range, ...]
    tied: bool

    @property
    def groups(self) -> int:
        return len(self.layers)

    def group_of(self, name: str) -> int:
        """The group that owns a parameter, by its whole-model name. A tied embedding is the last group's."""
        if name.startswith("layers."):
            layer = int(name.split(".", 2)[1])
            return next(group for group, layers in enumerate(self.layers) if layer in layers)
        return 0 if name.startswith("embed.") and not self.tied else self.groups - 1

    def uses(self, name: str) -> tuple[int, ...]:
        """The groups that compute with a parameter."""
        owner = self.group_of(name)
        return (0, owner) if self.tied and name == TIED and owner > 0 else (owner,)

    def owned(self, names: Iterable[str], groups: Sequence[int]) -> list[str]:
        """Of these parameters, those that a device with these groups owns, in their order."""
        return [name for name in names if self.group_of(name) in groups]

    def used(self, names: Iterable[str], groups: Sequence[int]) -> list[str]:
        """Of these parameters, those that a device with these groups needs."""
        return [name for name in names if set(self.uses(name)) & set(groups)]


def stages_of(num_layers: int, table: Table, tied: bool, per_stage: Sequence[int] = ()) -> Stages:
    """Spread the layers over a table's groups: ``per_stage`` layers per device, or evenly where it is empty.

    What does not divide goes to the earlier groups, as the last has the head. A device's layers are spread over its
    chunks alike. Raises LockstepError where a group would stay empty.
    """
    shares = list(per_stage) or _even(num_layers, table.groups, table)
    if len(shares) != table.stages or sum(shares) != num_layers or (per_stage and min(shares) < 1):
        raise LockstepError(
            f"parallel.layers_per_stage is {list(per_stage)}: give {table.stages} numbers (one per stage) that sum to "
            f"the model's {num_layers} layers, each at least 1"
        )
    counts = [0] * table.groups
    for device, share in enumerate(shares):
        short, longer = divmod(share, table.chunks)
        for chunk in range(table.chunks):
            counts[table.group(device, chunk)] = short + (chunk < longer)
    if min(counts) == 0:
        raise LockstepError(
            f"the model has {num_layers} layers, too few for {table.stages} pipeline stages x {table.chunks} chunks "
            f"({table.name}): lower parallel.pp"
            + (", or take a schedule with fewer chunks such as 1f1b" if table.chunks > 1 else "")
        )
    starts = [sum(counts[:group]) for group in range(table.groups + 1)]
    return Stages(tuple(range(a, b) for a, b in pairwise(starts)), tied)


def _even(num_layers: int, groups: int, table: Table) -> list[int]:
    """Layers per device such that groups hold nearly equal numbers, the earlier ones more."""
    short, longer = divmod(num_layers, groups)
    shares = [0] * table.stages
    for group in range(groups):
        shares[table.holder(group)[0]] += short + (group < longer)
    return shares
