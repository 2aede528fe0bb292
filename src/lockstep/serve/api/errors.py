"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, each with a sentence that helps."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lockstep.errors import LockstepError
from lockstep.serve.api import schema
from lockstep.serve.api.invalid import sentence
from lockstep.serve.state import PromptTooLong, QueueFull
from lockstep.serve.supervisor import EngineFailed

log = logging.getLogger("lockstep.serve")


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(json.dumps(self.body), self.status, headers, "application/json")


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": about, "model": schema.ErrorBody}
    for status, about in (
        ("4XX", "The request is wrong, refused, or too much: the message says what to change."),
        ("5XX", "The server cannot answer: it is shutting down or starting (503), or has a bug (500)."),
    )
}
"""For the OpenAPI document."""


def explain(error: Exception, endpoint: str = "") -> ApiError:
    """The answer to an error of the engine or of the request."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return ApiError(400, str(error), "messages or prompt", "context_length_exceeded")
        case QueueFull():
            return ApiError(429, str(error), code="queue_full")
        case LockstepError():
            return ApiError(400, str(error))
        case EngineFailed():
            return ApiError(503, str(error), code="engine_unavailable")
        case RequestValidationError():
            return ApiError(400, *sentence(list(error.errors()), error.body, endpoint))
        case HTTPException():
            return ApiError(error.status_code, _said(error))
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"this is a bug in the server: {type(error).__name__}: {error}")


def install(app: FastAPI) -> None:
    """Let every error of the application be answered in this shape."""

    async def answer(request: Request, error: Exception) -> Response:
        api_error = explain(error, request.url.path)
        response = api_error.response()
        if isinstance(error, HTTPException) and error.headers:
            response.headers.update(error.headers)
        return response

    for kind in (ApiError, LockstepError, EngineFailed, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _said(error: HTTPException) -> str:
    if error.status_code == 404:
        return "there is no such path: /openapi.json lists the ones there are."
    if error.status_code == 405:
        return "this path does not take this method: /openapi.json lists what each takes."
    detail = str(error.detail)
    if detail == "There was an error parsing the body":
        why = "compressed, not UTF-8, nested too deeply, a number too long"
        return f"the body cannot be read as JSON ({why}): send one object."
    return detail if detail != HTTPStatus(error.status_code).phrase else f"{detail}."
