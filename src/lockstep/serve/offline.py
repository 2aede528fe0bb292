"""Batches without a server: many prompts at once, the engine's steps until all are done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lockstep.errors import LockstepError
from lockstep.serve.params import Completion, Embedding, Output, SamplingParams, completion
from lockstep.serve.pooling import Vector

if TYPE_CHECKING:
    from lockstep.serve.engine import Engine

Prompts = str | Sequence[str | Sequence[int]]
Params = SamplingParams | Sequence[SamplingParams] | None


def generate(engine: Engine, prompts: Prompts, params: Params) -> list[Completion]:
    """See `Engine.generate`. LockstepError names the prompt that is wrong, before any is begun."""
    texts: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
    if texts and isinstance(texts[0], int):
        raise LockstepError("prompts is one list of token ids: give a list of prompts, [[1, 2, 3]].")
    each = [params or SamplingParams()] * len(texts) if not isinstance(params, Sequence) else list(params)
    if len(each) != len(texts):
        raise LockstepError(f"{len(texts)} prompts came with {len(each)} sampling parameters: give one for each.")
    ids = [_checked(engine, text, one, i, len(texts)) for i, (text, one) in enumerate(zip(texts, each, strict=True), 1)]
    requests = [engine.add_request(prompt, one) for prompt, one in zip(ids, each, strict=True)]
    seeds = [engine.seed_of(request) for request in requests]
    outputs: dict[tuple[int, int], list[Output]] = {}
    for output in _until_done(engine):
        outputs.setdefault((output.request, output.choice), []).append(output)
    return [
        completion(outputs[request, choice], ids[i], each[i], seed=seeds[i], prompt=i, choice=choice)
        for i, request in enumerate(requests)
        for choice in range(each[i].n)
    ]


def embed(engine: Engine, prompts: Sequence[Sequence[int]], wanted: Embedding) -> list[Vector]:
    """See `Engine.embed`."""
    for prompt in prompts:
        engine.check(prompt, SamplingParams(max_tokens=0))
    requests = [engine.add_request(prompt, embedding=wanted) for prompt in prompts]
    outputs = {output.request: output for output in _until_done(engine)}
    return [_vector(outputs[request]) for request in requests]


def _checked(engine: Engine, text: str | Sequence[int], params: SamplingParams, number: int, of: int) -> list[int]:
    """The token ids of a prompt that the engine would take."""
    try:
        ids = engine.model.tokenizer.encode(text) if isinstance(text, str) else list(text)
        engine.check(ids, replace(params, n=1))
    except LockstepError as error:
        raise type(error)(f"prompt {number}: {error}" if of > 1 else str(error)) from error
    return ids


def _until_done(engine: Engine) -> Iterator[Output]:
    while engine.has_work():
        yield from engine.step()


def _vector(output: Output) -> Vector:
    """Of an embedding's only output."""
    if output.error is not None:
        raise LockstepError(output.error)
    return np.frombuffer(output.vector, dtype="<f4")
