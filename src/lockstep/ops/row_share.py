"""How many rows of a micro-batch a device has, where several share them: plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowShare:
    """This device's run of the rows, for numbers of rows that leave one remainder: with so many ``units`` for each of
    the members there are ``members * units + rest`` rows, of which the first ``rest`` members have one more. So sizes
    are whole lines over the units. One member has all rows."""

    members: int = 1
    index: int = 0
    rest: int = 0

    def all_rows(self, units: int) -> int:
        return self.members * units + self.rest

    def own_rows(self, units: int) -> int:
        return units + (self.index < self.rest)

    def units(self, own: int) -> int:
        """From how many rows are own."""
        return own - (self.index < self.rest)

    def run(self, whole: int) -> tuple[int, int]:
        """Where the own rows begin among so many, and how many there are."""
        units = whole // self.members
        return units * self.index + min(self.index, self.rest), self.own_rows(units)
