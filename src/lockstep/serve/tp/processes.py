"""The processes of the other ranks: started, set up over a socket each, watched, ended. No tensors here."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from lockstep.errors import LockstepError
from lockstep.serve.launch import Launched
from lockstep.serve.state import RanksLost
from lockstep.serve.tp.messages import CannotJoin, Join, Pages, answers, hear
from lockstep.serve.wire import frame

_GRACE = 2.0
"""Seconds that a rank may take to end after the first one has hung up."""
_TOLD = 1.0
"""Seconds until the system has told of the end of a process whose connections broke."""


class Processes:
    """All ranks but the first. `close` ends them, as does the end of this process, however it comes."""

    def __init__(self, ranks: Sequence[Launched]) -> None:
        self._ranks, self._lost = list(ranks), _Lost()
        self._directory = Path(tempfile.mkdtemp(prefix="lockstep-ranks-"))
        self.close = weakref.finalize(self, _end, self._ranks, self._lost, self._directory)
        for number, rank in enumerate(self._ranks, 1):
            name = f"rank {number} of {len(self._ranks) + 1}"
            threading.Thread(target=_watch, args=(rank.process, name, self._lost), daemon=True).start()

    @property
    def meeting(self) -> Path:
        """The file where the ranks find each other."""
        return self._directory / "meeting"

    def tell(self, message: Join | Pages) -> None:
        """Set every rank up; each is told its number."""
        for number, rank in enumerate(self._ranks, 1):
            own = msgspec.structs.replace(message, rank=number) if isinstance(message, Join) else message
            try:
                rank.link.sendall(frame(own))
            except OSError:
                raise self.lost() from None

    def hear(self) -> None:
        """Wait until every rank has done what it was told. Raises what went wrong in one of them, or RanksLost."""
        for rank in self._ranks:
            match hear(rank.link, answers):
                case None:
                    raise self.lost()
                case CannotJoin(reason=reason, mistake=mistake):
                    raise LockstepError(reason) if mistake else RanksLost(f"a rank failed: {reason}")

    def have_met(self) -> None:
        """The ranks have found each other: a process that is killed later leaves no file behind."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def lost(self) -> RanksLost:
        """Why the ranks serve no more."""
        return RanksLost(self._lost.wait(_TOLD) or "the connection to another rank broke")

    def watch(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the reason, from another thread, when a rank ends that should not."""
        self._lost.watch(tell)


class _Lost:
    """Which rank ended first, unless they were to end."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._tell: Callable[[str], None] | None = None
        self._known, self._lock = threading.Event(), threading.Lock()
        self.closing = False

    def put(self, reason: str) -> None:
        with self._lock:
            if self._reason is not None or self.closing:
                return
            self._reason, tell = reason, self._tell
        self._known.set()
        if tell is not None:
            tell(reason)

    def wait(self, seconds: float) -> str | None:
        self._known.wait(seconds)
        return self._reason

    def watch(self, tell: Callable[[str], None]) -> None:
        with self._lock:
            self._tell, reason = tell, self._reason
        if reason is not None:
            tell(reason)


def _watch(process: subprocess.Popen[bytes], name: str, lost: _Lost) -> None:
    code = process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    lost.put(f"{name} {how}")


def _end(ranks: list[Launched], lost: _Lost, directory: Path) -> None:
    lost.closing = True
    for rank in ranks:
        rank.link.close()
    for rank in ranks:
        try:
            rank.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
    shutil.rmtree(directory, ignore_errors=True)
