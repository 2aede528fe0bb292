"""POST /v1/embeddings: vectors of texts or token ids, as lists of numbers or base64."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from lockstep.serve.api.errors import ApiError
from lockstep.serve.api.respond import json_response, until_gone
from lockstep.serve.api.schema import EmbeddingRequest
from lockstep.serve.api.service import Service, raise_if_failed
from lockstep.serve.params import Embedding, SamplingParams
from lockstep.serve.pooling import Vector


async def embeddings(service: Service, body: EmbeddingRequest, request: Request) -> Response:
    service.check_model(body.model)
    prompts = await asyncio.to_thread(_prompts, service, body)
    vectors = await until_gone(request, _vectors(service, body, prompts, request.state.client), lambda: None)
    count = sum(map(len, prompts))
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json_response({"object": "list", "data": data, "model": service.name, "usage": usage})


def _prompts(service: Service, body: EmbeddingRequest) -> list[list[int]]:
    """Token ids of each input."""
    given: list[Any] = [body.input] if isinstance(body.input, str) or isinstance(body.input[0], int) else body.input
    prompts = [service.encode(one) if isinstance(one, str) else service.fitting(one) for one in given]
    empty = next((index for index, prompt in enumerate(prompts) if not prompt), None)
    if empty is not None:
        raise ApiError(400, f"input {empty} has no tokens: give some text.", "input")
    return prompts


async def _vectors(
    service: Service, body: EmbeddingRequest, prompts: Sequence[list[int]], client: str | None
) -> list[Vector]:
    """Each prompt is a request of its own to the engine, and no more of them at once than it runs together: the queue
    is for others too."""
    room = asyncio.Semaphore(service.config.max_running)
    wanted = Embedding(body.pooling or "mean", body.normalize is not False)

    async def one(prompt: list[int]) -> Vector:
        async with room:
            return await _vector(service, prompt, wanted, client or body.user or "")

    tasks = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:  # one is refused, or the client is gone: nobody wants the others
        for task in tasks:
            task.cancel()


async def _vector(service: Service, prompt: list[int], wanted: Embedding, client: str) -> Vector:
    request = await service.engine.submit(
        prompt, SamplingParams(max_tokens=0), timeout=service.config.request_timeout, client=client, embedding=wanted
    )
    try:
        (output,) = [output async for output in request.outputs()]
        raise_if_failed(output)
        return np.frombuffer(output.vector, dtype="<f4")
    finally:
        if request.running:
            service.engine.abort(request)


def _encoded(vector: Vector, body: EmbeddingRequest) -> list[float] | str:
    """base64: of the little-endian float32 values."""
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]
