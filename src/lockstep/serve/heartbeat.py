"""Whether an engine that is asked, and does not answer, still works. Plain numbers: no process, no clock of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

BEATS = 4
"""Times that an engine is asked before it is given up."""
_COMPUTING = 20
"""How many times longer one that computes may take: a step of a large model, or a loop without an end."""


@dataclass
class Heartbeat:
    """Asked at every beat. It is given up after BEATS without an answer in which it computed nothing either, or after
    many more in which it did.

    What counts are beats, not seconds: where the whole machine was asleep, the engine has its time after that.
    """

    silent: int = 0
    """Beats since it answered."""
    idle: int = 0
    """Of those, the latest in which it did not compute."""
    computed: float = 0.0

    def answered(self) -> None:
        self.silent = self.idle = 0

    def beat(self, computed: float) -> bool:
        """Whether to give it up. computed: its seconds of processor time so far."""
        self.silent += 1
        self.idle = self.idle + 1 if computed == self.computed else 0
        self.computed = computed
        return self.idle > BEATS or self.silent > BEATS * _COMPUTING


def processor_seconds(pid: int) -> float:
    """What the threads of a process have computed; 0.0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
