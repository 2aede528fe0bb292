"""Real processes that can be killed, started from a server that has imported everything once: each costs a fork, and
not an import of PyTorch. They have the environment of the server's start."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["pytest", "lockstep.compile", "lockstep.train", "lockstep.model", "lockstep.cli.train"])


def start(arguments: list[str], log: Path) -> ForkServerProcess:
    """`lockstep ARGUMENTS` in its own process; everything it prints goes to ``log``."""
    process = context.Process(target=_run, args=(arguments, str(log)))
    process.start()
    return process


def finish(arguments: list[str], log: Path, timeout: float = 120) -> tuple[int | None, str]:
    """Run to the end; the exit code and everything printed."""
    process = start(arguments, log)
    process.join(timeout)
    assert process.exitcode is not None, f"still running after {timeout} s: {log.read_text()}"
    return process.exitcode, log.read_text()


def answer(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module returns in a process of its own."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()  # EOFError where it failed: its traceback is on standard error
    finally:
        process.join(30)


def _answer(link: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    link.send(function(*arguments))


def _run(arguments: list[str], log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)

    import torch

    from lockstep.cli.app import run
    from lockstep.train import speed

    torch.set_num_threads(1)
    speed.matrix_peak = lambda dtype: 1e11  # saves its measurement, a second for each process
    code = run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
