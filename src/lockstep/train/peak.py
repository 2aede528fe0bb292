"""The peak of a process's resident memory, from a moment on."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def reset_peak() -> None:
    """Begin to measure anew, where the system can (Linux); elsewhere the peak is that of the process's whole life."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_resident() -> int:
    """The most resident memory since `reset_peak`, bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
