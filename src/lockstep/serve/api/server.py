"""The running server: up at once, ready when the engine is, until a signal; then it ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import sys
from collections.abc import Iterator

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lockstep.config.serve import ServeConfig
from lockstep.serve.api.app import create_app
from lockstep.serve.port import url
from lockstep.serve.replicas import Replicas


def serve(engine: Replicas, name: str, config: ServeConfig, bound: socket.socket, log_level: str = "warning") -> None:
    """Serve until SIGTERM or SIGINT; running requests then have `drain_seconds` to finish.

    Raises LockstepError when the engine cannot be started because of what the user gave.
    """
    app = create_app(engine, name, config)
    settings = uvicorn.Config(
        app, log_level=log_level, access_log=False, timeout_graceful_shutdown=config.drain_seconds, lifespan="on",
        timeout_keep_alive=_IDLE, http=Connection,
    )  # fmt: skip
    _open_as_many_as_allowed()
    _Server(settings, engine, f"Lockstep serves {name} at {url(bound)}/v1").run(sockets=[bound])
    if engine.refusal is not None:
        raise engine.refusal


_IDLE = 75
"""Seconds that an idle connection stays open: longer than clients keep theirs (httpx, OpenAI's client: 5), so
that none is closed just when it is used again."""


def _open_as_many_as_allowed() -> None:
    """Every connection is an open file, and the usual limit, 1024, is meant for older programs."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Connection(H11Protocol):
    """Leaves a client that has closed its side and waits for no more, and one that does not go on with its request.

    The first at once: uvicorn would close only when what waits to be sent has been, so as long as the client does not
    read it, its request would run, and be written to. The second after PATIENCE seconds for a head, or without a byte
    of a body: uvicorn would wait for ever, and open connections are limited.
    """

    PATIENCE = 30.0
    _slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._slow = self.loop.call_later(self.PATIENCE, self._leave)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        state = self.conn.their_state
        if state is h11.IDLE and self._slow is not None and data:
            return  # more of a head, which has its time as a whole
        if self._slow is not None:
            self._slow.cancel()
        wanted = state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))
        self._slow = self.loop.call_later(self.PATIENCE, self._leave) if wanted else None

    def eof_received(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._slow is not None:
            self._slow.cancel()
        super().connection_lost(exc)

    def _leave(self) -> None:
        self.transport.abort()


class _Server(uvicorn.Server):
    """Says one line when the engine is ready, and ends with exit code 0 after a signal that it obeyed."""

    def __init__(self, config: uvicorn.Config, engine: Replicas, ready: str) -> None:
        super().__init__(config)
        self._engine, self._ready = engine, ready
        self._watch: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._watch = asyncio.create_task(self._first_start())

    async def _first_start(self) -> None:
        await self._engine.first_start()
        if self._engine.ready:
            print(self._ready, flush=True, file=sys.stdout)
        else:
            self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        kept = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)
