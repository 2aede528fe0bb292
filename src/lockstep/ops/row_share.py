"""How many rows of a micro-batch a device has, where several share them: plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowShare:
    """This device's run of the rows, for numbers of rows that leave one remainder: with so many ``units`` for each of
    the members there are ``members * step * units + rest`` rows, of which the first members have a step more while
    there are whole ones left, and the last what is less than one. So sizes are whole lines over the units. One member
    has all rows.

    step: rows that stay together. With 2 every run begins at an even row, where a gradient's chain that goes by pairs
    of rows can be handed on (`linear.weight_gradient`).
    """

    members: int = 1
    index: int = 0
    rest: int = 0
    step: int = 1

    def all_rows(self, units: int) -> int:
        return self.members * self.step * units + self.rest

    def own_rows(self, units: int) -> int:
        return self.step * units + self._more(self.index)

    def units(self, own: int) -> int:
        """From how many rows are own."""
        return (own - self._more(self.index)) // self.step

    def run(self, whole: int) -> tuple[int, int]:
        """Where the own rows begin among so many, and how many there are."""
        units = self.units_of(whole)
        before = sum(self._more(i) for i in range(self.index))
        return self.step * units * self.index + before, self.own_rows(units)

    def units_of(self, whole: int) -> int:
        """From how many rows there are."""
        return whole // (self.members * self.step)

    def _more(self, index: int) -> int:
        steps, rows = divmod(self.rest, self.step)
        return self.step * (index < steps) + rows * (index == self.members - 1)


def row_shares(count: int, members: int, step: int) -> list[int]:
    """Of so many rows, how many each member has."""
    rest = count % (members * step)
    return [RowShare(members, i, rest, step).run(count)[1] for i in range(members)]
