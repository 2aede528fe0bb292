"""How many rows a step may have, so that who waits for its next token does not wait long. Plain numbers, no clock."""

from __future__ import annotations

from math import ceil, sqrt

_FIRST = 64
"""Rows of a step before any was timed."""


class Pace:
    """Learns from the steps that ran. A step that took too long makes the next ones smaller in proportion, at once; one
    that was full and short makes them larger by the root of what is left, so that a single fast one decides little."""

    def __init__(self, seconds: float, most: int) -> None:
        """seconds: that a step may take. most: rows that no step exceeds."""
        self._seconds, self._most = seconds, most
        self.rows = min(_FIRST, most)

    def ran(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        scale = self._seconds / max(seconds, 1e-9)
        if scale < 1:
            self.rows = max(1, min(self.rows, int(rows * scale)))
        elif rows >= self.rows:
            self.rows = min(self._most, ceil(self.rows * min(sqrt(scale), 2.0)))
