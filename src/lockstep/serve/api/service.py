"""What the endpoints share: the model's name, the worker, and the way of a request through it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.datastructures import State

from lockstep.config.serve import ServeConfig
from lockstep.model.tokenizer import Tokenizer
from lockstep.serve.api.errors import ApiError
from lockstep.serve.api.metrics import Metrics
from lockstep.serve.api.schema import JsonObjectFormat, JsonSchemaFormat, Message, Sampling
from lockstep.serve.api.token_text import TokenTexts
from lockstep.serve.api.tracing import Generation
from lockstep.serve.params import Output, SamplingParams
from lockstep.serve.replicas import Replicas
from lockstep.serve.sampler import draw_seed
from lockstep.serve.state import PromptTooLong
from lockstep.serve.structured import StructuredOutputs
from lockstep.serve.supervisor import EngineFailed, Request

log = logging.getLogger("lockstep.serve")


@dataclass
class Service:
    """One served model."""

    name: str
    config: ServeConfig
    engine: Replicas
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    _texts: TokenTexts | None = None

    @property
    def max_length(self) -> int:
        return self.engine.loaded.max_length

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.loaded.tokenizer

    @property
    def texts(self) -> TokenTexts:
        tokenizer = self.tokenizer
        if self._texts is None or self._texts.tokenizer is not tokenizer:
            self._texts = TokenTexts(tokenizer)
        return self._texts

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise ApiError(
                404, f"there is no model {name!r}: this server has {self.name!r}.", "model", "model_not_found"
            )

    def fitting(self, ids: list[int]) -> list[int]:
        """These token ids. PromptTooLong for more than can fit, before anybody reads millions of them."""
        if len(ids) > self.max_length:
            raise PromptTooLong(
                f"this model's maximum context length is {self.max_length} tokens, but {len(ids)} were sent: "
                "send fewer."
            )
        return ids

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a prompt. PromptTooLong for one that is so long that it cannot fit, before it is tokenized."""
        if len(text) > self.max_length and len(text) > self.max_length * self.tokenizer.longest:
            raise PromptTooLong(
                f"this model's maximum context length is {self.max_length} tokens, of at most {self.tokenizer.longest} "
                f"characters each, but the prompt has {len(text)} characters: shorten the prompt."
            )
        return self.tokenizer.encode(text, add_special=add_special)

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids under the chat template; LockstepError where it cannot take the messages, or the tools."""
        if tools and "tools" not in (self.tokenizer.template or ""):
            raise ApiError(400, "this model's chat template does not know tools: remove them.", "tools")
        plain = [message.plain() for message in messages]
        text = self.tokenizer.render(plain, add_generation_prompt, tools, **(variables or {}))
        return self.encode(text, add_special=False)


@dataclass(frozen=True)
class Run:
    """The prompts of one HTTP request in the engine. `outputs` gives (prompt index, output) as they come."""

    service: Service
    prompts: list[list[int]]
    requests: list[Request]
    seed: int
    identity: str
    created: int
    told: Generation | None = None
    """Where requests have spans."""

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """Ends when all are finished. However it is left, what is unfinished is aborted."""
        merged: asyncio.Queue[tuple[int, Output | BaseException | None]] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._follow(i, merged)) for i in range(len(self.requests))]
        running = len(tasks)
        try:
            while running:
                index, output = await merged.get()
                if output is None:
                    running -= 1
                elif isinstance(output, BaseException):
                    raise output
                else:
                    if self.told is not None:
                        self.told.output(output)
                    raise_if_failed(output)
                    yield index, output
        finally:
            for task in tasks:
                task.cancel()
            self.abort()
            if self.told is not None:
                self.told.end()

    async def _follow(self, index: int, merged: asyncio.Queue[tuple[int, Output | BaseException | None]]) -> None:
        watch = self.service.metrics.watch(len(self.prompts[index]))
        try:
            async for output in self.requests[index].outputs():
                watch.output(output)
                merged.put_nowait((index, output))
            merged.put_nowait((index, None))
        except EngineFailed as failure:
            merged.put_nowait((index, failure))

    def abort(self) -> None:
        for request in self.requests:
            if request.running:
                self.service.engine.abort(request)


async def start(
    service: Service,
    kind: str,
    body: Sampling,
    prompts: list[list[int]],
    params: SamplingParams,
    state: State,
) -> Run:
    """Hand the prompts to the engine: all of them, or none when one is refused. state: what the gate says of it."""
    seed = draw_seed() if params.seed is None else params.seed
    identity = f"{kind}-{secrets.token_hex(12)}"
    limits = [limit for limit in (body.timeout, service.config.request_timeout) if limit is not None]
    wanted, room = len(prompts) * params.n, service.config.max_queue * service.config.replicas
    if wanted > room:
        raise ApiError(
            400, f"{wanted} completions are asked for, but no more than {room} may wait here: ask for fewer."
        )
    # At once: the engine takes what has come between two steps, so one after the other would take a step for each.
    submits = [
        asyncio.ensure_future(
            service.engine.submit(
                prompt,
                replace(params, seed=seed),
                priority=body.priority or 0,
                timeout=min(limits, default=None),
                salt=body.cache_salt,
                client=state.client or body.user or "",
            )
        )
        for prompt in prompts
    ]
    try:
        requests = await asyncio.gather(*submits)
    except BaseException:
        await _take_back(service, submits)
        raise
    span = getattr(state, "span", None)
    told = None if span is None else Generation(span, service.name, identity, prompts, params)
    run = Run(service, prompts, requests, seed, identity, int(time.time()), told)
    log.info("%s is %s: %d prompt tokens, seed %d", state.label, identity, sum(map(len, prompts)), seed)
    return run


async def _take_back(service: Service, submits: Sequence[asyncio.Task[Request]]) -> None:
    """Abort those that were accepted, and those that would be."""
    for submit in submits:
        submit.cancel()
    for done in await asyncio.gather(*submits, return_exceptions=True):
        if isinstance(done, Request):
            service.engine.abort(done)


def sampling(body: Sampling, **more: Any) -> SamplingParams:
    """The engine's parameters of a request; null is the default."""
    given: dict[str, Any] = {
        "temperature": body.temperature, "top_k": body.top_k, "top_p": body.top_p, "min_p": body.min_p,
        "presence_penalty": body.presence_penalty, "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty, "seed": body.seed, "n": body.n,
        "logit_bias": {int(k): v for k, v in body.logit_bias.items()} if body.logit_bias else None,
        "stop": _stops(body.stop), "stop_token_ids": body.stop_token_ids, "ignore_eos": body.ignore_eos,
    }  # fmt: skip
    return SamplingParams(**{name: value for name, value in given.items() if value is not None}, **more)


class Usage:
    """Adds up a request's usage from its outputs."""

    def __init__(self) -> None:
        self.generated = 0
        self._cached: dict[int, int] = {}

    def add(self, index: int, output: Output) -> None:
        self.generated += len(output.token_ids)
        if output.choice == 0:
            self._cached[index] = output.cached_tokens

    def report(self, prompts: list[list[int]], thought: int = 0) -> dict[str, Any]:
        """thought: tokens that were thought, not said."""
        prompt = sum(map(len, prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.generated,
            "total_tokens": prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
            "completion_tokens_details": {"reasoning_tokens": thought},
        }


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def structure_of(body: Sampling) -> StructuredOutputs | None:
    """What the completion must look like; None where the request does not say."""
    match body.response_format:
        case JsonObjectFormat():
            return StructuredOutputs(json_object=True)
        case JsonSchemaFormat(json_schema=wanted):
            return StructuredOutputs(json=wanted.schema_, json_object=wanted.schema_ is None)
    given = body.structured_outputs
    return None if given is None else StructuredOutputs(**given.fields())


def raise_if_failed(output: Output) -> None:
    """ApiError where the engine could not go on, or the deadline came."""
    if output.error is not None:
        raise ApiError(400 if output.refused else 500, output.error)
    if output.finish_reason == "timeout":
        raise ApiError(408, "the request took longer than its timeout: ask for fewer tokens or allow more time.")
