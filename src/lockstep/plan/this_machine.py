"""This machine as a cluster description, measured: `lockstep doctor --calibrate`.

A device is one process with its share of the cores. The products are those of the kernels that train; messages go
between two processes as a mesh sends them. Run as a module it is one of those two processes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.plan.yaml_file import check_can_write, write_yaml

_DEPTHS = (64, 128, 256, 512, 1024)
"""Inner dimensions whose rates give the efficiency curve."""
_ROWS, _COLUMNS = 512, 512
_LARGE = 8 * 2**20
"""Bytes of the message that shows the bandwidth."""
_OFFLOADED = 4 * 2**20
"""Bytes that a layer of a small model offloads."""


def calibrate_machine(path: str | Path, processes: int = 2) -> dict[str, Any]:
    """Measure for some seconds, write the description to ``path`` and return it. ``processes``: that share the cores.

    Raises LockstepError where the file cannot be written or the two processes cannot meet.
    """
    check_can_write(path, "path")
    threads = max(1, len(os.sched_getaffinity(0)) // processes if hasattr(os, "sched_getaffinity") else 1)
    rates = {name: _rates(dtype, threads) for name, dtype in (("bf16", "bfloat16"), ("fp32", "float32"))}
    half, best = _curve(rates["bf16"])
    latency, bandwidth, disk = _between_processes()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 / processes
    content = {
        "name": "this-machine",
        "devices": processes,
        "uncertainty": 6,
        "device": {
            "matrix_tflops": {"bf16": best / 1e12, "fp32": _curve(rates["fp32"])[1] / 1e12},
            "memory_gb": round(memory, 1), "memory_gb_s": round(_copies(threads) / 1e9, 2), "cores": threads,
            "matrix_efficiency": 1.0, "half_k": round(half, 1), "memory_efficiency": 1.0,
            "launch_us": round(_call() * 1e6, 1), "host_gb_s": round(disk / 1e9, 3),
            "host_memory_gb": round(shutil.disk_usage(tempfile.gettempdir()).free / 2**31 / processes, 1),
            "copies_hide": False,  # the cores that compute make them
        },
        "levels": [
            {"name": "machine", "size": processes, "gb_s": round(bandwidth / 1e9, 3),
             "latency_us": round(latency * 1e6, 1), "hop_us": round(latency * 1e6 / 2, 1),
             "topology": "switch"},
        ],
        "sources": [
            f"Measured on this machine by lockstep doctor --calibrate: a device is one of {processes} processes with "
            f"{threads} threads; products of {_ROWS} x {_COLUMNS} by the training kernels at depths {_DEPTHS}; "
            "copies of 64 MiB; messages of 4 B and 8 MiB between two processes.",
            f"Offload: 4 MiB written to a file in {tempfile.gettempdir()} and read again, as the trainer does, by two "
            "processes at once; half of what is free there.",
        ],
    }  # fmt: skip
    try:
        write_yaml(path, content)
    except OSError as error:
        raise LockstepError(
            f"cannot write the description to {path}: {error.strerror}. Choose another path."
        ) from error
    return content


def _seconds(call: Callable[[], object], runs: int = 9) -> float:
    call()
    found = []
    for _ in range(runs):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)  # whatever else runs only adds time


def _rates(dtype: str, threads: int) -> dict[int, float]:
    """FLOP/s by inner dimension."""
    import torch

    from lockstep.ops import operators

    ops, before = operators("bitwise"), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = {}
        for depth in _DEPTHS:
            x = torch.ones(_ROWS, depth, dtype=getattr(torch, dtype))
            weight = ops.pack(torch.ones(_COLUMNS, depth), x.dtype)
            with torch.no_grad():
                seconds = _seconds(partial(ops.linear, x, weight))
            found[depth] = 2 * _ROWS * _COLUMNS * depth / seconds
        return found
    finally:
        torch.set_num_threads(before)


def _curve(rates: dict[int, float]) -> tuple[float, float]:
    """(half_k, best rate) of rate = best k / (k + half_k), fitted to the time per unit of depth."""
    import numpy as np

    depth = np.array(list(rates))
    slope, best = np.polyfit(1 / depth, 1 / np.array(list(rates.values())), 1)
    best = max(best, 1e-3 / max(rates.values()))
    return max(0.0, float(slope / best)), float(1 / best)


def _copies(threads: int) -> float:
    """Bytes per second of a copy, read and written."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        source, target = torch.ones(16 * 2**20), torch.ones(16 * 2**20)
        return 2 * source.nbytes / _seconds(lambda: target.copy_(source), runs=5)
    finally:
        torch.set_num_threads(before)


def _offload_seconds(meet: Callable[[], object]) -> float:
    """Of offload, there and back, as the trainer does it. meet: waits for the others, who do the same: ranks share
    memory and disk."""
    import torch

    from lockstep.memory.host import Disk

    with tempfile.TemporaryDirectory(prefix="lockstep-machine-") as name:
        disk = Disk(Path(name))

        def there_and_back() -> float:
            meet()
            began = time.perf_counter()
            trip = disk.leave([torch.ones(_OFFLOADED, dtype=torch.uint8)])
            trip.settle()
            disk.freed()
            trip.fetch()
            trip.back()
            disk.freed()
            return time.perf_counter() - began

        return min(there_and_back() for _ in range(12))


def _call() -> float:
    """Seconds of one operator on next to nothing, autograd included."""
    import torch

    from lockstep.ops import operators

    ops, x, w = operators("bitwise"), torch.ones(1, 16), torch.ones(16, requires_grad=True)
    return _seconds(lambda: ops.rms_norm(x, w, 1e-5), runs=200)


def _between_processes() -> tuple[float, float, float]:
    """Of two processes: latency in seconds and bytes per second of what they exchange, and bytes per second of offload
    in one direction, while both do it."""
    from lockstep.parallel.launch import launch
    from lockstep.parallel.mesh import MeshShape

    with tempfile.TemporaryDirectory(prefix="lockstep-machine-") as name:
        found = Path(name) / "found.json"
        if launch([str(found)], MeshShape(dp=2), module="lockstep.plan.this_machine") != 0:
            raise LockstepError("two processes of this machine could not exchange messages: their message is above")
        small, large, offload = json.loads(found.read_text())
    return small, _LARGE / max(large - small, 1e-9), 2 * _OFFLOADED / offload


def _rank(file: Path) -> None:
    import torch

    from lockstep.parallel.join import joined
    from lockstep.parallel.mesh import MeshShape

    with joined(MeshShape(dp=2)) as mesh:
        small, large = torch.zeros(1), torch.zeros(_LARGE // 4)
        found = [_seconds(lambda: mesh["dp"].gather(small), 50), _seconds(lambda: mesh["dp"].gather(large), 9)]
        mine = torch.tensor([_offload_seconds(lambda: mesh["dp"].gather(small))])
        found.append(max(float(each) for each in mesh["dp"].gather(mine)))
        if mesh.first:
            file.write_text(json.dumps(found))


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
