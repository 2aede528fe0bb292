"""From a port to a running server: bind first, load the model, serve until a signal, end in order."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from lockstep.config.serve import ServeConfig
from lockstep.errors import LockstepError
from lockstep.serve.api.app import create_app
from lockstep.serve.engine import Engine


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before the model is loaded: a port in use is known at once, early clients wait."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise LockstepError(f"host {host!r} cannot be found: {error}. Give an address, such as 127.0.0.1.") from error
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(1024)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise LockstepError(
                f"port {port} on {host} is in use by another program: stop it, or choose another with --port "
                "(0 takes a free one)."
            ) from error
        raise LockstepError(f"cannot listen on {host}:{port}: {error.strerror or error}.") from error
    return bound


def url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(engine: Engine, name: str, config: ServeConfig, bound: socket.socket, log_level: str = "warning") -> None:
    """Serve until SIGTERM or SIGINT; running requests then have `drain_seconds` to finish."""
    app = create_app(engine, name, config)
    settings = uvicorn.Config(
        app, log_level=log_level, access_log=False, timeout_graceful_shutdown=config.drain_seconds, lifespan="on",
    )  # fmt: skip
    _Server(settings, f"Lockstep serves {name} at {url(bound)}/v1").run(sockets=[bound])


class _Server(uvicorn.Server):
    """Says one line when it is ready, and ends with exit code 0 after a signal that it obeyed."""

    def __init__(self, config: uvicorn.Config, ready: str) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            print(self._ready, flush=True, file=sys.stdout)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        kept = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)
