"""Where offloaded activations wait: pinned memory of the host, or a file where the device is the host itself.

A place takes bytes (flat uint8 tensors) and gives them back in new tensors. Copies run beside the computation; a trip's
methods say at which moment they must be over, so that device memory is freed at moments that do not depend on speed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.errors import LockstepError

_SECTOR = 4096
_WORTH = 64 * 2**20
"""Bytes that are freed before pages go back to the system: it takes milliseconds, and every page that is used again is
filled with zeros first. What is less is used again by the layers that come."""
_malloc_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's; other C libraries unmap large blocks when they are freed."""


class Trip(Protocol):
    """Tensors on their way out, away, and back: `settle`, `fetch` and `back` are called in this order, once each."""

    def settle(self) -> None:
        """The copy outside is whole: the tensors that were given may go."""

    def fetch(self) -> None:
        """Begin to bring them back, into memory that is taken now."""

    def back(self) -> list[Tensor]:
        """Wait for them: flat uint8 tensors as they were given."""


class Place(Protocol):
    """Where tensors wait."""

    def leave(self, wholes: Sequence[Tensor]) -> Trip:
        """Begin to copy flat uint8 tensors out. Their values must not change before `settle`."""

    def freed(self) -> None:
        """Tensors that have left were freed."""


def place_for(device: torch.device, folder: Path) -> Place:
    """Where what lies on this device is offloaded to. folder: for the file that stands for a host's memory on a CPU."""
    if device.type == "meta":
        return Nowhere()
    return Disk(folder) if device.type == "cpu" else Pinned(device)


def in_memory(folder: Path) -> bool:
    """Whether the system keeps this directory's files in memory, as far as it tells (Linux)."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False
    there = folder.resolve()
    holding = [(len(at), kind) for at, kind in mounts if there.is_relative_to(at)]
    return bool(holding) and max(holding)[1] in ("tmpfs", "ramfs")


class Disk:
    """A file without a name: when the process ends, however it ends, the system takes its space back.

    One thread reads and writes, in order, while others compute. Places in the file are used again by what has the same
    size, so the file grows to the most that is ever away at once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.size = 0
        """Bytes of the file."""
        self._free: dict[int, list[int]] = {}
        self._freed = 0  # bytes since pages last went back to the system
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="lockstep-offload")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open as long as this is
        except OSError as error:
            raise self.failed(error) from error

    def leave(self, wholes: Sequence[Tensor]) -> Trip:
        return _OnDisk(self, wholes)

    def freed(self) -> None:
        """Give their pages back to the system: the C library keeps what is freed in the middle of its heap."""
        if _malloc_trim is not None and self._freed >= _WORTH:
            self._freed = 0
            _malloc_trim(0)

    def count(self, size: int) -> None:
        """So many bytes of memory were freed."""
        self._freed += size

    def submit(self, call: Any) -> Future[None]:
        """Let the thread that reads and writes do it."""
        return self._worker.submit(call)

    def take(self, size: int) -> int:
        """A place in the file for so many bytes."""
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        at, self.size = self.size, self.size + -(-size // _SECTOR) * _SECTOR
        return at

    def give_back(self, at: int, size: int) -> None:
        """What was there came back, and is dropped: of the place in the file others may be next."""
        self._free[size].append(at)
        self.count(size)

    def write(self, tensors: Sequence[Tensor], at: int) -> None:
        for tensor in tensors:
            left = tensor.numpy().data
            while left:
                done = os.pwrite(self._file.fileno(), left, at)
                left, at = left[done:], at + done

    def read(self, tensors: Sequence[Tensor], at: int) -> None:
        for tensor in tensors:
            left = tensor.numpy().data
            while left:
                done = os.preadv(self._file.fileno(), [left], at)
                if not done:
                    raise OSError(errno.EIO, "the file ends before its time")
                left, at = left[done:], at + done

    def failed(self, error: OSError) -> LockstepError:
        """What a person reads."""
        reason = error.strerror or str(error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = "offloaded activations cannot be kept on disk"
        if not full:
            return LockstepError(
                f"parallel.offload_dir: {what} in {self.folder}: {reason}. Give a directory that can be written"
            )
        return LockstepError(
            f"parallel.offload_dir: {what} in {self.folder}: {reason}; this process has {self.size / 1e9:.3g} GB there "
            f"and {_space(self.folder)} are free. Give a directory on a larger disk, or offload fewer layers "
            "(parallel.offload_layers, parallel.offload_per_stage) and recompute them instead"
        )


class _OnDisk:
    def __init__(self, disk: Disk, wholes: Sequence[Tensor]) -> None:
        self._disk, self._tensors = disk, list(wholes)
        self._sizes = [whole.numel() for whole in wholes]
        self._at = disk.take(sum(self._sizes))
        weakref.finalize(self, disk.give_back, self._at, sum(self._sizes)).atexit = False
        self._work: Future[None] = disk.submit(self._write)

    def _write(self) -> None:
        self._disk.write(self._tensors, self._at)

    def _read(self) -> None:
        self._disk.read(self._tensors, self._at)

    def settle(self) -> None:
        self._wait()
        self._tensors = []
        self._disk.count(sum(self._sizes))

    def fetch(self) -> None:
        self._tensors = [torch.empty(size, dtype=torch.uint8) for size in self._sizes]
        self._work = self._disk.submit(self._read)

    def back(self) -> list[Tensor]:
        self._wait()
        found, self._tensors = self._tensors, []
        return found

    def _wait(self) -> None:
        try:
            self._work.result()
        except OSError as error:
            raise self._disk.failed(error) from error


class Pinned:
    """Page-locked memory of an accelerator's host, copied to and from on a stream of its own.

    Buffers are used again by what has the same size. Device memory is freed and taken on the computing stream, which
    waits for the copies by events; the host waits for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device)
        self._free: dict[int, list[Tensor]] = {}

    def leave(self, wholes: Sequence[Tensor]) -> Trip:
        return _OnHost(self, wholes)

    def freed(self) -> None:
        """The allocator uses it again."""

    def take(self, size: int) -> Tensor:
        free = self._free.setdefault(size, [])
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        for buffer in buffers:
            self._free[buffer.numel()].append(buffer)


class _OnHost:
    def __init__(self, place: Pinned, wholes: Sequence[Tensor]) -> None:
        self._place, self._device = place, wholes[0].device
        self._host = [place.take(whole.numel()) for whole in wholes]
        weakref.finalize(self, place.give_back, self._host).atexit = False
        self._tensors = list(wholes)
        self._copied = self._copy(self._host, self._tensors)

    def settle(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._copied)
        self._tensors = []

    def fetch(self) -> None:
        self._tensors = [torch.empty(one.numel(), dtype=torch.uint8, device=self._device) for one in self._host]
        self._copied = self._copy(self._tensors, self._host)

    def back(self) -> list[Tensor]:
        torch.accelerator.current_stream(self._device).wait_event(self._copied)
        found, self._tensors = self._tensors, []
        return found

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.Event:
        """Copies that begin when all computation that was asked for so far is done; an event that is their end."""
        side = self._place.stream
        side.wait_stream(torch.accelerator.current_stream(self._device))
        with side:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        event: torch.Event = side.record_event()
        return event


class Nowhere:
    """Of tensors without values: what is away takes no memory."""

    def leave(self, wholes: Sequence[Tensor]) -> Trip:
        return _Gone(wholes)

    def freed(self) -> None:
        """No memory was taken."""


class _Gone:
    def __init__(self, wholes: Sequence[Tensor]) -> None:
        self._sizes = [whole.numel() for whole in wholes]
        self._tensors: list[Tensor] = []

    def settle(self) -> None:
        pass

    def fetch(self) -> None:
        self._tensors = [torch.empty(size, dtype=torch.uint8) for size in self._sizes]

    def back(self) -> list[Tensor]:
        found, self._tensors = self._tensors, []
        return found


def _space(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e9:.3g} GB"
    except OSError:
        return "unknown bytes"
