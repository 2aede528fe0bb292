"""What stands before the endpoints: the API key, the size of bodies, the request's id. Plain ASGI."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.serve.api import page
from lockstep.serve.api.errors import ApiError

log = logging.getLogger("lockstep.serve")
_PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Asked for every few seconds for as long as the server lives: in the log only at debug level."""
_TRACE = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
"""The header `traceparent` (W3C Trace Context, section 3.2), with the id of the trace that a request belongs to."""
OPEN_PATHS = _PROBES | page.PATHS
"""Asked for by machines that have no key, and by browsers before their user can give one."""


class Gate:
    """Refuses what has no key or is too big, and logs a line per request with its id, and its trace's.

    Both are `request.state.label`, for other lines about it."""

    def __init__(self, app: ASGIApp, keys: Mapping[str, str], max_body: int) -> None:
        """keys: name by key; with none, everybody may come in. The name is `request.state.client` of who has a key."""
        self._app = app
        self._keys = [(b"Bearer " + key.encode(), name) for key, name in keys.items()]
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")[:100]
        identity = given if given and given.isascii() and given.isprintable() else f"req-{secrets.token_hex(8)}"
        trace = _TRACE.fullmatch(headers.get("traceparent", "").strip())
        label = identity if trace is None else f"{identity} trace={trace[1]}"
        path = scope.get("raw_path", b"").decode("latin-1")  # as it was sent: a line break in it is one of the log's
        begin, begun = time.perf_counter(), False

        async def labelled(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = identity
                seconds = time.perf_counter() - begin
                level = logging.DEBUG if path in _PROBES else logging.INFO
                log.log(level, "%s %s %s %d %.3fs", label, scope["method"], path, message["status"], seconds)
            await send(message)

        client = self._client(headers)
        refusal = self._refusal(scope["path"], headers, client)
        if refusal is not None:
            return await refusal.response()(scope, receive, labelled)
        scope.setdefault("state", {}).update(client=client, label=label)
        if scope["method"] == "HEAD":  # what answers GET answers it; the server leaves the body out
            scope = {**scope, "method": "GET"}
        try:
            await self._app(scope, _limited(receive, self._max_body), labelled)
        except _TooBig:
            await _too_big(self._max_body).response()(scope, receive, labelled)
        except asyncio.CancelledError:  # the time that running requests have at a shutdown is over
            if not begun:
                late = ApiError(503, "the server is shutting down: send the request again in a moment.")
                await late.response()(scope, receive, labelled)

    def _client(self, headers: Headers) -> str | None:
        """Whose key it is; "" for the key without a name, None for no right key. Every key is compared in full, so the
        time tells nothing of which ones are close."""
        given = headers.get("authorization", "").encode("latin-1", "replace")
        found = [name for key, name in self._keys if hmac.compare_digest(given, key)]
        return found[0] if found else None

    def _refusal(self, path: str, headers: Headers, client: str | None) -> ApiError | None:
        if self._keys and client is None and path not in OPEN_PATHS:
            return ApiError(401, "send this server's API key as `Authorization: Bearer KEY`.", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_body:
            return _too_big(self._max_body)
        return None


class _TooBig(BaseException):
    """Passes through the application's own error handlers up to the gate."""


def _too_big(limit: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {limit} bytes: send less, or start the server with a larger max_body."
    )


def _limited(receive: Receive, limit: int) -> Receive:
    """Counts the bytes of a body that did not say its length."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise _TooBig
        return message

    return counted
