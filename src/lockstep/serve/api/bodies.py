"""Reads the bodies of requests beside the event loop: checking 300,000 parts of messages takes seconds, in which others
are to be answered. Python lets the loop's thread run in between.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_SHORT = 2**14
"""Bytes of a body that is checked sooner than a thread has it."""


class BodyRoute(APIRoute):
    """A route whose long bodies are parsed and checked on a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model = None if self.body_field is None else self.body_field.field_info.annotation
        if not isinstance(model, type) or not issubclass(model, BaseModel):
            return handle

        async def checked(request: Request) -> Response:
            reading = _Reading(request, model)
            try:
                return await handle(reading)
            except HTTPException:
                if reading.wrong is not None:  # FastAPI takes whatever reading raises for a body that is no JSON
                    raise reading.wrong from None
                raise

        return checked


class _Reading(Request):
    """A request whose `json` is the checked model already; FastAPI lets an instance pass as it is."""

    def __init__(self, request: Request, model: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model
        self.wrong: RequestValidationError | None = None

    async def json(self) -> Any:
        raw = await self.body()
        return await super().json() if len(raw) < _SHORT else await asyncio.to_thread(self._checked, raw)

    def _checked(self, raw: bytes) -> BaseModel:
        given = json.loads(raw)
        try:
            return self._model.model_validate(given, from_attributes=True)  # as FastAPI does
        except ValidationError as error:
            told = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
            self.wrong = RequestValidationError(told, body=given)
            raise self.wrong from error
