"""Starting the ranks of a run as processes of this machine, and watching over them. Imports no torch: they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from lockstep.errors import LockstepError
from lockstep.parallel.mesh import MeshShape

LOST = 75
"""The exit code of a rank that ended because another one did (sysexits: EX_TEMPFAIL)."""
MEETING = "LOCKSTEP_MEETING"
"""The environment variable that names the file in which the ranks that `launch` starts find each other."""
_GRACE = 10.0
"""Seconds that ranks have to end by themselves when another has."""

_FEW, _PER_CORE = 16, 4
"""So many processes, or so many for each core, are started on one machine, and no more."""

Rank = subprocess.Popen[bytes]


def is_rank() -> bool:
    """Whether somebody, `launch` or torchrun, started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(command: Sequence[str], shape: MeshShape, module: str = "lockstep") -> int:
    """Run ``python -m MODULE COMMAND`` as the ranks of a mesh on this machine, and wait. Returns the exit code.

    The first rank has this terminal. A signal to stop goes to every rank once; after a second one those that hang are
    killed. Raises LockstepError, after ending the others, where one was killed or failed by itself.
    """
    cores = os.cpu_count() or 1
    if shape.size > max(_FEW, _PER_CORE * cores):
        raise LockstepError(
            f"parallel asks for {shape.describe()} = {shape.size} processes, and this machine has {cores} cores: start "
            "them on the machines that they are for, with torchrun (docs/parallel.md)"
        )
    with tempfile.TemporaryDirectory(prefix="lockstep-ranks-") as logs:
        ranks = [_start([module, *command], rank, shape.size, Path(logs)) for rank in range(shape.size)]
        try:
            with _signals_to(ranks) as asked:
                _wait(ranks, asked)
        finally:
            hung = _end(ranks)
        if len(asked) > 1 and hung:
            who = f"rank {hung[0]}" if len(hung) == 1 else f"ranks {', '.join(map(str, hung))}"
            print(f"{who} of {len(ranks)} hung and had to be killed; go on with --resume", file=sys.stderr)
            return 128 + asked[-1]
        if asked and _interrupted([rank.returncode for rank in ranks], asked):
            print("stopped before the ranks had begun: nothing new was saved", file=sys.stderr)
            return 128 + asked[-1]
        return _outcome(ranks, Path(logs))


def _start(command: Sequence[str], rank: int, size: int, logs: Path) -> Rank:
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), MEETING: str(logs / "meeting")}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))
    quiet = None if rank == 0 else (logs / str(rank)).open("wb")
    return subprocess.Popen(
        [sys.executable, "-m", *command], env=environment, stdin=subprocess.PIPE, stdout=quiet,
        stderr=quiet, start_new_session=True,  # a Ctrl-C reaches them through us, once
    )  # fmt: skip


def _wait(ranks: list[Rank], asked: list[int]) -> None:
    """Until all have ended, or one has failed or a second signal came and the others had their time to notice."""
    deadline = None
    while any(rank.poll() is None for rank in ranks):
        if deadline is None and (len(asked) > 1 or any(rank.poll() not in (None, 0) for rank in ranks)):
            deadline = time.monotonic() + _GRACE
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _end(ranks: list[Rank]) -> list[int]:
    """Those that had to be killed."""
    killed = []
    for number, rank in enumerate(ranks):
        if rank.poll() is None:
            rank.kill()
            killed.append(number)
        rank.wait()
        if rank.stdin is not None:
            rank.stdin.close()
    return killed


def _interrupted(codes: Sequence[int], asked: Sequence[int]) -> bool:
    """Whether ranks ended of these signals alone, as they do before they know how to save (those in a run end with 0),
    and of our killing those that then waited for them."""
    by_signal = {code for number in asked for code in (-number, 128 + number)}
    return bool(by_signal & set(codes)) and by_signal.issuperset(set(codes) - {0, LOST, -signal.SIGKILL})


def _outcome(ranks: list[Rank], logs: Path) -> int:
    """The exit code. Raises for the rank that ended first: a killed one before one that failed by itself."""
    codes = {number: rank.returncode for number, rank in enumerate(ranks)}
    failed = {number: code for number, code in codes.items() if code not in (0, LOST)}
    if not failed:
        return max(codes.values())
    ours = (-signal.SIGKILL,) if len(failed) > 1 else ()  # `_end` may have killed those that hung
    number = min(failed, key=lambda n: (failed[n] in ours, failed[n] >= 0, n))
    code = failed[number]
    if code < 0:
        raise LockstepError(
            f"rank {number} of {len(ranks)} was killed by {signal.Signals(-code).name}"
            + (" (out of memory?)" if code == -signal.SIGKILL else "")
            + "; the others were ended. Go on from the last checkpoint with --resume"
        )
    if number > 0 and codes[0] in (0, LOST):  # the first rank has not told it itself
        said = (logs / str(number)).read_text(errors="replace").strip().splitlines()[-20:]
        print(f"rank {number} of {len(ranks)} failed:\n" + "\n".join(said), file=sys.stderr)
    return code


@contextmanager
def _signals_to(ranks: list[Rank]) -> Iterator[list[int]]:
    """Pass SIGTERM and SIGINT on; a rank saves at the first and ends at the second. Yields those that came."""
    asked: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) == 1:
            print(f"{signal.Signals(number).name}: the ranks end; once more ends them at once", file=sys.stderr)
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
