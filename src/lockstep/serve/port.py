"""The server's port. Imports nothing that takes time: a port in use is known before anything is loaded."""

from __future__ import annotations

import errno
import socket

from lockstep.errors import LockstepError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, so that early clients wait in its queue."""
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
