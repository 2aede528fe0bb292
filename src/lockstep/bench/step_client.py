"""The other end of `step_server.py`: a side of a training bench as a process that takes a step when it is told to."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import LockstepError


@dataclass
class Side:
    """One side: its process, and what it answered so far."""

    name: str
    process: subprocess.Popen[str]
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def step(self) -> float:
        """Seconds of one more step. LockstepError when the process is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write("step\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise LockstepError(f"the side {self.name} ended with {self.process.wait()}: what it printed says why.")
        answer = json.loads(line)
        self.losses.append(answer["loss"])
        self.peak_bytes = answer["peak_bytes"]
        return float(answer["seconds"])

    @staticmethod
    def started(name: str, command: Sequence[str]) -> Side:
        """Its process runs this command."""
        return Side(name, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def end(self) -> None:
        """A side ends when its input does; one that is stuck is ended."""
        try:
            self.process.communicate(timeout=30)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.process.kill()
            self.process.wait()


def version(python: str, package: str) -> str:
    """The version of a package in the environment of this Python."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def interpreter(package: str, peers: Path) -> str:
    """The Python of a peer: of its own environment, or this one."""
    own = peers / package / "bin" / "python"
    if own.exists():
        return str(own)
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    raise LockstepError(
        f"{package} is installed neither in {peers / package} nor beside Lockstep: run `benchmarks/peers.sh {package}`,"
        " or leave its sides out of --vs."
    )
