"""A side of a training bench is a process of its own: one step for every line it reads, one line of JSON back.

Imports nothing but the standard library, so that peers run it in environments of their own.
"""

import json
import sys
import time


def serve(step):  # type: ignore[no-untyped-def]
    """Answer each line of standard input with {"seconds", "loss", "peak_bytes"} of one more call of step() -> loss."""
    for _ in sys.stdin:
        began = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "loss": loss, "peak_bytes": peak_bytes()}), flush=True)


def peak_bytes() -> int:
    """The most resident memory this process has had. Not `getrusage`, which counts what its parent had at the fork."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
