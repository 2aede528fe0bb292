"""Moving a tensor from one rank to another: the little that everything above needs of ``torch.distributed``."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from lockstep.errors import LockstepError

_TAGS = 1 << 30


class PeerLost(LockstepError):
    """Another rank ended, or its connection broke."""


class Pending(Protocol):
    """A send or a receive that was begun."""

    def wait(self) -> None:
        """Return when the tensor was taken over by the transport (send) or is filled (receive); again: at once."""


class Transport(Protocol):
    """Point to point between ranks; the messages of an ordered pair arrive in the order in which they were sent."""

    rank: int
    size: int

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Begin to send a contiguous tensor, which must not be changed until the send is waited for."""

    def receive(self, out: Tensor, source: int) -> Pending:
        """Begin to receive into a contiguous tensor of the shape and dtype that was sent."""


class ProcessTransport:
    """Ranks as processes, over a ``torch.distributed`` group of all of them, or the backend of one.

    Every message of a pair has its own tag, so that Gloo, which promises no order, keeps it.
    """

    def __init__(self, group: dist.ProcessGroup, patience: timedelta | None = None) -> None:
        """patience: how long to wait for a message; None: as long as the group does."""
        self._patience = () if patience is None else (patience,)
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def send(self, tensor: Tensor, to: int) -> Pending:
        self._sent[to] += 1
        return self._begin(self._group.send, tensor, to, self._sent[to] % _TAGS)

    def receive(self, out: Tensor, source: int) -> Pending:
        self._received[source] += 1
        return self._begin(self._group.recv, out, source, self._received[source] % _TAGS)

    def _begin(self, start: Any, tensor: Tensor, peer: int, tag: int) -> Pending:
        try:
            return _Checked(start([tensor], peer, tag), self.rank, peer, self._patience)
        except RuntimeError as error:
            raise lost(self.rank, peer, error) from error


class _Checked:
    def __init__(self, work: Any, rank: int, peer: int, patience: tuple[timedelta, ...]) -> None:
        self._work, self._rank, self._peer, self._patience = work, rank, peer, patience

    def wait(self) -> None:
        """Done once: Gloo would wait a second time for a second message."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait(*self._patience)
        except RuntimeError as error:
            raise lost(self._rank, self._peer, error) from error


def lost(rank: int, peer: int, error: Exception) -> PeerLost:
    """The error of a connection that broke."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return PeerLost(
        f"rank {rank} lost the connection to rank {peer}, which has probably ended ({reason}): see that rank's own "
        "message, then go on from the last checkpoint with --resume"
    )


class NoTransport:
    """A single rank has nobody to talk to."""

    rank, size = 0, 1

    def send(self, tensor: Tensor, to: int) -> Pending:
        raise ValueError(f"one rank cannot send to rank {to}")

    def receive(self, out: Tensor, source: int) -> Pending:
        raise ValueError(f"one rank cannot receive from rank {source}")
