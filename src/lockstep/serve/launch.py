"""Starts the engine's process. Imports nothing that takes time, so that it can be the first thing a server does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Launched:
    """A process of `lockstep.serve.child` that waits for an EngineSpec on its end of the socket."""

    process: subprocess.Popen[bytes]
    link: socket.socket


def launch(threads: int | None = None) -> Launched:
    """threads: how many it computes with; None: as many as it likes."""
    environment = None if threads is None else {"OMP_NUM_THREADS": str(threads), **os.environ}
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "lockstep.serve.child", str(theirs.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
    return Launched(process, ours)
