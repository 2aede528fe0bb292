"""The mesh as a value: named axes, and which rank stands where. No processes, no devices, no globals."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from lockstep.config.parallel import ParallelConfig
from lockstep.errors import LockstepError

AXES = ("pp", "dp", "cp", "tp")
"""The axes that multiply to the ranks, outermost first: the ranks of a tensor-parallel group are neighbours."""


@dataclass(frozen=True)
class MeshShape:
    """Degrees of the axes. ``pp * dp * cp * tp`` ranks.

    ``ep`` (experts) is no axis of its own: it regroups the ``dp * cp`` ranks of a stage, as every rank of them holds
    other tokens. Ranks of a group hold other experts; those that hold the same ones, one of each group, are ``edp``.
    Sharding over ``dp`` (fsdp) is a level, not a degree, and so no part of the shape.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep"):
            if getattr(self, axis) < 1:
                raise LockstepError(f"parallel.{axis} is {getattr(self, axis)}: a degree is at least 1")
        if (self.dp * self.cp) % self.ep:
            raise LockstepError(
                f"parallel.ep {self.ep} does not divide dp x cp = {self.dp * self.cp}: choose a degree that divides it"
            )

    @property
    def size(self) -> int:
        """Ranks in all."""
        return prod(self.degrees)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    def place(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank, by axis (``ep`` too)."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a mesh of {self.size}")
        found, rest = {}, rank
        for axis, degree in reversed(list(zip(AXES, self.degrees, strict=True))):
            rest, found[axis] = divmod(rest, degree)
        return {axis: found[axis] for axis in AXES} | {"ep": (found["dp"] * self.cp + found["cp"]) % self.ep}

    def rank(self, **place: int) -> int:
        """The rank at these coordinates; an axis that is left out is 0."""
        number = 0
        for axis, degree in zip(AXES, self.degrees, strict=True):
            at = place.get(axis, 0)
            if not 0 <= at < degree:
                raise ValueError(f"{axis} {at} is not in a mesh with {axis} {degree}")
            number = number * degree + at
        return number

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from this one along one axis only (``ep`` and ``edp`` too), itself included, in the
        order of that axis."""
        place = self.place(rank)
        if axis == "ep":
            first = (place["dp"] * self.cp + place["cp"]) // self.ep * self.ep
            return tuple(self._data_rank(place, first + i) for i in range(self.ep))
        if axis == "edp":
            return tuple(self._data_rank(place, i) for i in range(place["ep"], self.dp * self.cp, self.ep))
        return tuple(self.rank(**{**place, axis: i}) for i in range(getattr(self, axis)))

    def check_world(self, ranks: int) -> None:
        """LockstepError where the degrees do not multiply to this many processes."""
        if self.size != ranks:
            said = " x ".join(f"{axis} {degree}" for axis, degree in zip(AXES, self.degrees, strict=True))
            raise LockstepError(
                f"parallel: {said} = {self.size} ranks, but {ranks} process{'es were' if ranks > 1 else ' was'} "
                f"started: change a degree so that the product is {ranks}, or start {self.size}"
            )

    def describe(self) -> str:
        """``pp2 dp4``: the degrees above 1; ``1 rank`` where there are none."""
        parts = [f"{axis}{getattr(self, axis)}" for axis in (*AXES, "ep") if getattr(self, axis) > 1]
        return " ".join(parts) or "1 rank"

    @staticmethod
    def of(config: ParallelConfig) -> MeshShape:
        """The mesh that a configuration asks for."""
        return MeshShape(config.pp, config.dp, config.cp, config.tp, config.ep)

    def _data_rank(self, place: dict[str, int], number: int) -> int:
        dp, cp = divmod(number, self.cp)
        return self.rank(**{**{axis: place[axis] for axis in AXES}, "dp": dp, "cp": cp})
