"""Clients that have gone: their streams end at once, and nothing more is written to the closed connection. Clients that
do not go on with their request: they are left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from lockstep.serve.api.respond import EventStream, json_response
from lockstep.serve.api.server import Connection

ASK = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"
RESET = struct.pack("ii", 1, 0)
Leave = Callable[[socket.socket], None]


def reset(client: socket.socket) -> None:
    """As a process that was killed with data it had not read."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()


def stop_reading(client: socket.socket) -> None:
    """It closes its side alone, and reads nothing of what comes: the server's buffers stay full."""
    client.shutdown(socket.SHUT_WR)


async def left(leave: Leave, size: int, burst: int) -> tuple[int, int]:
    """A client leaves a stream that has `burst` events ready at each turn: (events made, events that could be made)."""
    made, ended = 0, asyncio.Event()

    async def events() -> AsyncIterator[dict[str, Any]]:
        nonlocal made
        for made in range(20_000):
            if made % burst == 0:
                await asyncio.sleep(0.001)
            yield {"text": "x" * size}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(events(), ended.set)(scope, receive, send)

    with socket.create_server(("127.0.0.1", 0)) as bound:
        settings = uvicorn.Config(app, http=Connection, lifespan="off", log_config=None, access_log=False)
        server = uvicorn.Server(settings)
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, bound.getsockname())
        await asyncio.get_running_loop().sock_sendall(client, ASK)
        await asyncio.get_running_loop().sock_recv(client, 100)
        before = -1
        while made != before and made < 5000:  # until the buffers are full, or there are many more events to come
            before = made
            await asyncio.sleep(0.03)
        leave(client)
        await asyncio.wait_for(ended.wait(), 60)
        client.close()
        server.should_exit = True
        await serving
    return made, 20_000 - 1


@pytest.mark.parametrize(("leave", "size"), [(reset, 10), (reset, 10_000), (stop_reading, 10), (stop_reading, 3000)])
def test_nothing_is_written_to_a_client_that_has_gone(leave: Leave, size: int, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        made, all_of_them = asyncio.run(left(leave, size, burst=50))
    assert made < all_of_them, "the stream ended before its last event"
    assert not [record.getMessage() for record in caplog.records]


class Hasty(Connection):
    PATIENCE = 0.3


async def answered(parts: list[bytes], pause: float) -> bytes:
    """What comes back to a client that sends its request in these parts; nothing where it is left."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await json_response(len(await Request(scope, receive).body()))(scope, receive, send)

    with socket.create_server(("127.0.0.1", 0)) as bound:
        settings = uvicorn.Config(app, http=Hasty, lifespan="off", log_config=None, access_log=False)
        server = uvicorn.Server(settings)
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await asyncio.sleep(pause)
        got = b""
        with contextlib.suppress(ConnectionError):
            while not got.endswith(b"6") and (more := await asyncio.wait_for(reader.read(999), 5)):
                got += more
        writer.close()
        server.should_exit = True
        await serving
    return got


HEAD = [b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 6\r\n", b"\r\n"]


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([], b""),
        ([*[b"POST / HTTP/1.1\r\n"], *[b"a: b\r\n"] * 8, b"\r\n"], b""),
        ([b"".join(HEAD), b"abc"], b""),
        ([*HEAD, *[b"a"] * 6], b"HTTP/1.1 200"),
        ([b"".join(HEAD) + b"abcdef"], b"HTTP/1.1 200"),
    ],
    ids=["nothing", "a head by drops", "half a body", "a body by drops", "at once"],
)
def test_a_client_that_does_not_go_on_is_left(parts: list[bytes], status: bytes):
    """A head has its time as a whole, a body as long as more of it comes."""
    assert asyncio.run(answered(parts, 0.1))[:12] == status
