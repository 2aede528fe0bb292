"""Two ways to answer, both of which notice a client that leaves: one JSON object, or server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep.serve.api.errors import explain

T = TypeVar("T")
to_json = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client closed the connection; nobody reads the answer."""


def json_response(body: Any, status: int = 200) -> Response:
    """Floats, all of them finite, are written so that reading them gives the same bits back (the shortest digits)."""
    return Response(to_json(body), status, media_type="application/json")


async def until_gone(request: Request, work: Awaitable[T], on_end: Callable[[], None]) -> T:
    """Await `work`; cancel it and raise ClientGone when the client disconnects first. on_end is called in any case."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        on_end()
        await _cancel(watch, task)


class EventStream(Response):
    """Server-sent events: one `data:` line per object, `[DONE]` at the end; typed: `event:` lines too.

    An error in mid-stream is sent as an event of its own, because the status line is gone already.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]], on_end: Callable[[], None], typed: bool = False) -> None:
        """on_end is called however it ends, also when the client left before the first event."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._on_end, self._typed = events, on_end, typed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.ensure_future(_disconnected(receive))
        task = asyncio.ensure_future(self._send(send))
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            self._on_end()
            await _cancel(watch, task)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:  # type: ignore[type-var]
                async for event in events:
                    await _data(send, to_json(event), event["type"] if self._typed else None)
                    # A client may be found gone by this very write. That is told in the next turn of the loop: until
                    # then, events that are ready already would be written to nobody.
                    await asyncio.sleep(0)
        except Exception as error:
            said = explain(error).body
            if self._typed:
                said = {**said["error"], "type": "error", "sequence_number": 0}
            await _data(send, to_json(said), "error" if self._typed else None)
        if not self._typed:
            await _data(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _data(send: Send, data: bytes, name: str | None = None) -> None:
    head = b"" if name is None else f"event: {name}\n".encode()
    await send({"type": "http.response.body", "body": b"%sdata: %s\n\n" % (head, data), "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait until it is over."""
    for task in tasks:
        if not task.done():
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
