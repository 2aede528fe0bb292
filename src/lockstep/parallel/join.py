"""Joining the other ranks of a run, as one of the processes that somebody started.

The protocol is torchrun's: a process finds its rank in ``RANK``, the number of all in ``WORLD_SIZE`` and the store that
introduces them to each other at ``MASTER_ADDR:MASTER_PORT``; those that `launch` starts meet in a file instead. Only
this file and `launch` know of that.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.parallel.collectives import Mesh
from lockstep.parallel.launch import LOST, MEETING
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.transport import PeerLost, ProcessTransport

_LONG = timedelta(days=7)
"""How long a rank waits for another: preparing a corpus may take hours, and one that died breaks the connection."""
_MEET = timedelta(minutes=1)
"""How long ranks that are there already take to find each other at most."""
_EVER = timedelta(days=3650)
"""How long ranks wait for work: a server may have none for months."""


@contextmanager
def joined(shape: MeshShape) -> Iterator[Mesh]:
    """The mesh of the processes that were started, this being one. Raises LockstepError for a wrong number of them."""
    ranks, meeting = int(os.environ["WORLD_SIZE"]), os.environ.get(MEETING)
    shape.check_world(ranks)
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    if meeting is None:
        dist.init_process_group(backend, timeout=_LONG)
    else:
        _end_with_parent()
        dist.init_process_group(
            backend, f"file://{meeting}", timeout=_LONG, rank=int(os.environ["RANK"]), world_size=ranks
        )
    try:
        assert dist.group.WORLD is not None
        mesh = Mesh(shape, ProcessTransport(dist.group.WORLD))
        yield mesh
        mesh.world.gather(torch.zeros(1))  # nobody leaves while others still read what it sent
    except PeerLost:
        if meeting is not None:  # whoever started us tells of the rank that ended first
            sys.stdout.flush()
            os._exit(LOST)
        raise
    finally:
        dist.destroy_process_group()


def meet(shape: MeshShape, rank: int, meeting: Path) -> Mesh:
    """The mesh of processes of this machine that find each other through a file that is not there yet.

    Nothing of it is global, so a process may belong to several, and to a run besides. It ends with the Mesh.
    """
    gloo: Any = dist.ProcessGroupGloo  # its type stubs know less than it has
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = _MEET
    group = gloo(dist.FileStore(str(meeting), shape.size), rank, shape.size, options)
    return Mesh(shape, ProcessTransport(group, _EVER))


def _end_with_parent() -> None:
    """Stop, saving, when the process that started us is gone: its end of our standard input closes."""

    def watch() -> None:
        while os.read(0, 1):  # not through sys.stdin: its lock would be held when the interpreter ends
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
