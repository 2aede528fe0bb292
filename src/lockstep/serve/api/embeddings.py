"""POST /v1/embeddings: vectors of texts or token ids, as lists of numbers or base64."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from lockstep.serve.api.errors import ApiError
from lockstep.serve.api.respond import json_response, until_gone
from lockstep.serve.api.schema import EmbeddingRequest
from lockstep.serve.api.service import Service


async def embeddings(service: Service, body: EmbeddingRequest, request: Request) -> Response:
    service.check_model(body.model)
    prompts = await asyncio.to_thread(_prompts, service, body)
    vectors = await until_gone(request, _vectors(service, body, prompts), lambda: None)
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
    prompts = [service.encode(one) if isinstance(one, str) else cast(list[int], one) for one in given]
    empty = next((index for index, prompt in enumerate(prompts) if not prompt), None)
    if empty is not None:
        raise ApiError(400, f"input {empty} has no tokens: give some text.", "input")
    return prompts


async def _vectors(service: Service, body: EmbeddingRequest, prompts: list[list[int]]) -> list[NDArray[np.float32]]:
    """A pass at a time, whoever asks, so that generation goes on in between."""
    pooling, unit = body.pooling or "mean", body.normalize is not False
    vectors: list[NDArray[np.float32]] = []
    for part in batches([len(prompt) for prompt in prompts], service.config.max_batch_tokens):
        async with service.embedding:
            vectors += await service.engine.embed(prompts[part], pooling, unit)
    if not all(np.isfinite(vector).all() for vector in vectors):
        raise ApiError(500, "the model gave hidden states that are not finite: its weights are damaged.")
    return vectors


def batches(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Consecutive prompts that go through the model together: at most `most` tokens, or a single prompt."""
    start = total = 0
    for end, length in enumerate(lengths):
        if end > start and total + length > most:
            yield slice(start, end)
            start, total = end, 0
        total += length
    if start < len(lengths):
        yield slice(start, len(lengths))


def _encoded(vector: NDArray[np.float32], body: EmbeddingRequest) -> list[float] | str:
    """base64: of the little-endian float32 values."""
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]
