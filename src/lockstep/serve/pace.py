"""How many rows a step may have, so that who waits for its next token does not wait long. Plain numbers, no clock."""

from __future__ import annotations

_FIRST = 64
"""Rows of a step before any was timed."""
_LEAST = 32
"""Rows below which a step is mostly what every step costs: smaller ones would give the tokens to nobody sooner."""


class Pace:
    """Learns from the steps that ran: the next may have as many rows more, or less, as the time that is left, or is
    missing, allows; but slowly, so that a stall of the machine, or a single fast step, decides little."""

    def __init__(self, seconds: float, most: int) -> None:
        """seconds: that a step may take. most: rows that no step exceeds."""
        self._seconds, self._most = seconds, most
        self._rows = float(min(_FIRST, most))

    @property
    def rows(self) -> int:
        return round(self._rows)

    def ran(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long. What was short and not full says nothing of larger ones."""
        scale = self._seconds / max(seconds, 1e-9)
        if scale < 1 or rows >= self.rows:
            scale = min(max(scale, 0.25), 4.0) ** 0.25
            self._rows = min(max(self._rows * scale, min(_LEAST, self._most)), self._most)
