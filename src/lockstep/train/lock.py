"""One trainer on one output directory: an advisory lock that the kernel releases when its process dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import LockstepError


@contextmanager
def run_lock(out: Path) -> Iterator[None]:
    """Hold the run's directory (made if missing); raises `LockstepError` if another process does."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise LockstepError(f"train.out: cannot write in {out}: {error.strerror or error}") from error
    try:
        _take(descriptor, out)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        if holder == str(os.getpid()):
            raise LockstepError(
                f"{out} is in use by another Trainer of this process: end it with its close()"
            ) from error
        who = f"process {holder}" if holder else "another process"
        raise LockstepError(
            f"{out} is in use by {who}, which trains there: wait for it, stop it, or choose another train.out"
        ) from error
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
