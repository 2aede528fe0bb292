"""How many cores this process may use. Imports nothing that takes time: the server's process asks, too."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that the scheduler gives this process; all of the machine's where the system cannot tell. At least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
