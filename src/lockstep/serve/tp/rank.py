"""The process of a rank other than the first (`launch.py` starts it). It joins in what the first rank tells it.

It ends when the first rank does: one that is gone has closed the socket, however it ended.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import LockstepError
from lockstep.serve.launch import begin
from lockstep.serve.tp.messages import CannotJoin, Done, Join, Pages, hear, orders
from lockstep.serve.wire import frame

if TYPE_CHECKING:
    from lockstep.model import Model
    from lockstep.parallel.collectives import Mesh
    from lockstep.serve.tp.fit import ServedPart

log = logging.getLogger("lockstep.serve")


def main() -> None:
    link, inbox = begin(), queue.SimpleQueue[Join | Pages]()
    threading.Thread(target=_listen, args=(link, inbox), daemon=True).start()
    import lockstep.serve.runner  # noqa: F401
    from lockstep.parallel.transport import PeerLost

    join = inbox.get()
    assert isinstance(join, Join)
    try:
        _serve(link, inbox, join)
    except PeerLost:
        pass  # the first rank knows which one ended
    except (LockstepError, OSError, MemoryError) as error:
        link.sendall(frame(CannotJoin(str(error), mistake=True)))
    except Exception as error:
        log.exception("rank %d failed", join.rank)
        link.sendall(frame(CannotJoin(f"{type(error).__name__}: {error}", mistake=False)))
        sys.exit(1)


def _listen(link: socket.socket, inbox: queue.SimpleQueue[Join | Pages]) -> None:
    """Hear what the first rank says, and end when it is gone, wherever the other thread waits."""
    while (message := hear(link, orders)) is not None:
        inbox.put(message)
    os._exit(0)


def _serve(link: socket.socket, inbox: queue.SimpleQueue[Join | Pages], join: Join) -> None:
    import torch

    from lockstep.parallel.join import meet
    from lockstep.parallel.mesh import MeshShape
    from lockstep.serve.runner import Runner
    from lockstep.serve.tp.orders import follow, receive_weights
    from lockstep.serve.tp.share import share_of
    from lockstep.serve.weights import give_weights

    link.sendall(frame(Done()))
    mesh = meet(MeshShape(tp=join.tp), join.rank, Path(join.meeting))
    model, part = _model(join, mesh)
    link.sendall(frame(Done()))
    pages = inbox.get()
    assert isinstance(pages, Pages)
    axis = mesh["tp"]
    dtype, share = getattr(torch, pages.dtype), share_of(model, part)
    runner = Runner(model, pages.count, dtype, pages.rows, pages.level, share)
    link.sendall(frame(Done()))
    while True:
        order = follow(axis)
        if order is None:
            give_weights(model.decoder, receive_weights(axis, dict(model.decoder.named_parameters())))
            runner.prepare()
        else:
            runner.compute(*order)


def _model(join: Join, mesh: Mesh) -> tuple[Model, ServedPart]:
    """This rank's part, from the model's files or from the first rank."""
    import torch

    from lockstep.config.model import ModelConfig
    from lockstep.model import Decoder, Model, PackedCache
    from lockstep.ops import operators
    from lockstep.serve.tp.fit import load_part, partition
    from lockstep.serve.tp.orders import follow, receive_weights
    from lockstep.serve.weights import give_weights

    if join.model is not None:
        packed = None
        if join.packed is not None:
            directory, limit, small = join.packed
            packed = PackedCache(log.info, limit, Path(directory), small)
        return load_part(join.model, mesh, join.dtype, join.numerics, packed)
    part = partition(ModelConfig(**join.config or {}), mesh, join.numerics)
    decoder = Decoder(part.local)
    shapes = {
        name: torch.empty(part.take(name, p).shape, dtype=getattr(torch, join.dtypes[name]), device="meta")
        for name, p in Decoder(part.config).named_parameters()
    }
    assert follow(mesh["tp"]) is None, "weights come first"
    give_weights(decoder, receive_weights(mesh["tp"], shapes))
    return Model(decoder.eval(), None, part.operators(operators(join.numerics)), getattr(torch, join.dtype)), part


if __name__ == "__main__":
    main()
