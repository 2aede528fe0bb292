"""Starts the engine's processes. Imports nothing that takes time, so that it can be the first thing a server does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.cores import usable_cores

_PR_SET_PDEATHSIG = 1
_UNSURE = ("-c", "--config", "--replicas", "--tp", "-h", "--help")
_PROCESSES = ("serve.replicas", "serve.tp")
"""Options, and keys of --set, that say how many processes there are, or that nothing is to be served."""


@dataclass(frozen=True)
class Launched:
    """A process that waits for its first message, for an engine an EngineSpec, on its end of the socket."""

    process: subprocess.Popen[bytes]
    link: socket.socket

    def end(self) -> None:
        """By force, where it has not ended."""
        self.link.close()
        self.process.kill()
        self.process.wait()


def launch(threads: int | None = None, tp: int = 1) -> Launched:
    """An engine's process. threads: how many it computes with; None: as many as it likes. tp: processes that share its
    model, which it starts."""
    return _launch("lockstep.serve.process", threads, str(tp))


def launch_early(arguments: Sequence[str]) -> Launched | None:
    """The engine of `lockstep serve` with these arguments of the command line, before they are understood. None where
    they ask for something else, or where a configuration has to be read before it is known how many processes do."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    if words[:1] != ["serve"] or len(words) < 2:
        return None
    unsure = any(a.startswith(_UNSURE) or any(key in a for key in _PROCESSES) for a in arguments)
    return None if unsure else launch()


def launch_ranks(tp: int) -> list[Launched]:
    """The processes that share a model with this one, which is the first of tp. Each has its share of the cores."""
    return [_launch("lockstep.serve.tp.rank", share_of_cores(tp)) for _ in range(tp - 1)]


def launch_trial() -> Launched:
    """The process that compiles structures on trial (`trial.py`), for the thread that calls, with which it ends."""
    return _launch("lockstep.serve.trial", 1, tied=True)


def share_of_cores(processes: int) -> int | None:
    """Threads for each of so many processes that compute at once; None for one, which takes what it likes."""
    return None if processes == 1 else max(1, usable_cores() // processes)


def _launch(module: str, threads: int | None, *arguments: str, tied: bool | None = None) -> Launched:
    environment = None if threads is None else {"OMP_NUM_THREADS": str(threads), **os.environ}
    ours, theirs = socket.socketpair()
    with theirs:
        # The system ties a process to the thread that started it: to the main one that is to this process.
        tied = threading.current_thread() is threading.main_thread() if tied is None else tied
        command = [sys.executable, "-m", module, str(theirs.fileno()), str(int(tied)), *arguments]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
    return Launched(process, ours)


def begin() -> socket.socket:
    """What a launched process does first; gives its end of the socket.

    It ends with the process that launched it, even when it is stopped then and cannot notice; signals to the whole
    group do not end it before that one says so.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux" and sys.argv[2] == "1":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return socket.socket(fileno=int(sys.argv[1]))
