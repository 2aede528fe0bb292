"""The application: which path leads to which function."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response

from lockstep.config.serve import ServeConfig, byte_count
from lockstep.serve.api import errors
from lockstep.serve.api.bodies import BodyRoute
from lockstep.serve.api.chat import chat
from lockstep.serve.api.completions import complete
from lockstep.serve.api.embeddings import embeddings
from lockstep.serve.api.errors import ApiError
from lockstep.serve.api.gate import Gate
from lockstep.serve.api.metrics import Metrics
from lockstep.serve.api.page import add_page
from lockstep.serve.api.respond import ClientGone, json_response
from lockstep.serve.api.responses import respond
from lockstep.serve.api.responses_schema import ResponsesRequest
from lockstep.serve.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    WeightsRequest,
)
from lockstep.serve.api.service import Service
from lockstep.serve.api.tracing import Traced, open_provider
from lockstep.serve.api.weights import update
from lockstep.serve.replicas import Replicas

_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "One object, or events with `stream`.", "content": {"text/event-stream": {}}}
}
"""For the OpenAPI document."""


def create_app(engine: Replicas, name: str, config: ServeConfig) -> FastAPI:
    """The server of one engine as an ASGI application. Its lifespan starts and stops the engine's process."""
    service = Service(name, config, engine, Metrics(engine, name))
    spans = open_provider() if config.otel else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(engine.run())
        yield
        engine.stop()
        await running
        if spans is not None:
            await asyncio.to_thread(spans.shutdown)  # sends what it has not sent yet

    # No /docs page: it would load scripts from elsewhere. /openapi.json has the schema.
    app = FastAPI(title="Lockstep", lifespan=lifespan, docs_url=None, redoc_url=None, responses=errors.RESPONSES)
    app.router.route_class = BodyRoute
    keys = {key: name for name, key in config.api_keys.items()}
    if config.api_key is not None:
        keys.setdefault(config.api_key, "")
    app.add_middleware(Gate, keys=keys, max_body=byte_count(config.max_body))
    if spans is not None:
        app.add_middleware(Traced, tracer=spans.get_tracer("lockstep.serve"))
    if config.cors_origins:
        # Outside the gate: a browser asks first, without a key, whether it may ask.
        app.add_middleware(
            CORSMiddleware, allow_origins=config.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    errors.install(app)
    app.add_exception_handler(ClientGone, _nobody)
    add_page(app)
    _generation(app, service)
    _tokens(app, service)
    _status(app, service)
    return app


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


def _generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=_STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await complete(service, body, request)

    @app.post("/v1/chat/completions", responses=_STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await chat(service, body, request)

    @app.post("/v1/responses", responses=_STREAMED)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await respond(service, body, request)

    @app.post("/v1/embeddings")
    async def embedding(body: EmbeddingRequest, request: Request) -> Response:
        return await embeddings(service, body, request)

    @app.post("/v1/weights")
    async def weights(body: WeightsRequest) -> Response:
        return await update(service, body)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_card(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_response(_card(service))


def _tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        if body.messages is not None:
            ids = await asyncio.to_thread(
                service.chat, body.messages, body.add_generation_prompt, None, body.chat_template_kwargs
            )
        else:
            ids = await asyncio.to_thread(service.encode, body.prompt or "", body.add_special_tokens)
        return json_response({"count": len(ids), "max_model_len": service.max_length, "tokens": ids})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        service.check_model(body.model)
        vocabulary = service.engine.loaded.vocabulary
        wrong = next((token for token in service.fitting(body.tokens) if token >= vocabulary), None)
        if wrong is not None:
            raise ApiError(
                400, f"token id {wrong} is not in the vocabulary: ids go from 0 to {vocabulary - 1}.", "tokens"
            )
        return json_response({"prompt": service.tokenizer.decode(body.tokens, skip_special=False)})


def _status(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Live: 200 while the server answers, whatever its engine does."""
        return json_response({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """200 when the engine can take requests, else 503 with the reason."""
        if service.engine.ready:
            return json_response({"status": "ok"})
        return json_response({"status": "unavailable", "reason": service.engine.reason}, 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _card(service: Service) -> dict[str, object]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "lockstep",
        "max_model_len": service.max_length,
    }
