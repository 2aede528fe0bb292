"""POST /v1/completions: prompts as text or token ids, OpenAI's legacy log-probabilities, echo, best_of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from lockstep.serve.api.respond import EventStream, json_response, until_gone
from lockstep.serve.api.schema import CompletionRequest
from lockstep.serve.api.service import Run, Service, Usage, sampling, start, structure_of
from lockstep.serve.api.token_text import TokenTexts
from lockstep.serve.params import Output, SamplingParams, TokenScore, join
from lockstep.serve.text import Detokenizer


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    service.check_model(body.model)
    prompts = await asyncio.to_thread(_prompts, service, body)
    params = await asyncio.to_thread(_params, body)
    run = await start(service, "cmpl", body, prompts, params, request.state)
    if body.stream:
        return EventStream(_events(run, body), run.abort)
    return json_response(await until_gone(request, _collect(run, body), run.abort))


def _params(body: CompletionRequest) -> SamplingParams:
    more: dict[str, Any] = {
        "max_tokens": 16 if body.max_tokens is None else body.max_tokens,
        "prompt_logprobs": body.logprobs if body.echo else None,
        "structured_outputs": structure_of(body),
    }
    if body.best_of is not None and body.best_of > (body.n or 1):
        return sampling(body.model_copy(update={"n": body.best_of}), logprobs=body.logprobs or 0, **more)
    return sampling(body, logprobs=body.logprobs, **more)


def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    """Token ids of each prompt."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [service.encode(prompt)]
    if isinstance(prompt[0], int):
        return [service.fitting(cast(list[int], prompt))]
    return [service.encode(p) if isinstance(p, str) else service.fitting(cast(list[int], p)) for p in prompt]


def _echoed(service: Service, body: CompletionRequest, index: int, ids: list[int]) -> str:
    """The text that echo puts before the completion."""
    if isinstance(body.prompt, str):
        return body.prompt
    one = body.prompt[index] if not isinstance(body.prompt[0], int) else None
    return one if isinstance(one, str) else service.tokenizer.decode(ids)


async def _events(run: Run, body: CompletionRequest) -> AsyncIterator[dict[str, Any]]:
    shapes = {i: _Shape(run, body, i) for i in range(len(run.prompts))}
    counted = Usage()
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    async for index, output in run.outputs():
        counted.add(index, output)
        yield _whole(run, [shapes[index].choice(output)], {"usage": None} if with_usage else {})
    if with_usage:
        yield _whole(run, [], {"usage": counted.report(run.prompts)})


async def _collect(run: Run, body: CompletionRequest) -> dict[str, Any]:
    counted = Usage()
    pieces: dict[tuple[int, int], list[Output]] = {}
    async for index, output in run.outputs():
        counted.add(index, output)
        pieces.setdefault((index, output.choice), []).append(output)
    choices = []
    for index in range(len(run.prompts)):
        shape = _Shape(run, body, index)
        mine = [join(pieces[key]) for key in sorted(pieces) if key[0] == index]
        choices += [shape.choice(output) for output in _best(mine, body)]
    return _whole(run, choices, {"usage": counted.report(run.prompts)})


def _best(outputs: list[Output], body: CompletionRequest) -> list[Output]:
    """best_of: the n choices with the highest mean log-probability, renumbered."""
    n = body.n or 1
    if len(outputs) <= n:
        return outputs
    ranked = sorted(outputs, key=lambda o: -sum(s.logprob for s in o.scores) / max(1, len(o.scores)))
    return [replace(output, choice=i) for i, output in enumerate(ranked[:n])]


def _whole(run: Run, choices: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": run.identity,
        "object": "text_completion",
        "created": run.created,
        "model": run.service.name,
        "choices": choices,
        "seed": run.seed,
        **more,
    }


@dataclass
class _Shape:
    """Gives the outputs for one prompt OpenAI's form; remembers which choices have begun (for echo)."""

    run: Run
    body: CompletionRequest
    index: int
    _begun: set[int] = field(default_factory=set)

    def choice(self, output: Output) -> dict[str, Any]:
        body, ids = self.body, self.run.prompts[self.index]
        first = output.choice not in self._begun
        self._begun.add(output.choice)
        prefix = _echoed(self.run.service, body, self.index, ids) if body.echo else ""
        shaped: dict[str, Any] = {
            "index": self.index * (body.n or 1) + output.choice,
            "text": (prefix if first else "") + output.text,
            "logprobs": None
            if body.logprobs is None
            else self._logprobs(output, first and bool(body.echo), len(prefix)),
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason is not None:
            shaped["stop_reason"] = output.stop_reason
        if body.return_token_ids:
            shaped["token_ids"] = list(output.token_ids)
            if first:
                shaped["prompt_token_ids"] = ids
        return shaped

    def _logprobs(self, output: Output, echo: bool, offset: int) -> dict[str, Any]:
        """OpenAI's legacy form: four lists with an entry for each token."""
        texts = self.run.service.texts
        scores: list[TokenScore | None] = list(output.scores)
        tokens = list(output.token_ids)
        offsets = [offset + at for at in output.text_offsets]
        if echo:
            ids = self.run.prompts[self.index]
            scores = [None, *(output.prompt_scores or ()), *scores]
            tokens = ids + tokens
            offsets = _offsets(self.run.service, ids) + offsets
        return {
            "tokens": [texts.text(token) for token in tokens],
            "token_logprobs": [None if score is None else score.logprob for score in scores],
            "top_logprobs": [None if score is None else _table(texts, score) for score in scores],
            "text_offset": offsets,
        }


def _table(texts: TokenTexts, score: TokenScore) -> dict[str, float]:
    """The most probable tokens by text, the token itself among them."""
    table = {texts.text(token): logprob for token, logprob in reversed(score.top)}
    return {texts.text(score.token): score.logprob} | dict(reversed(list(table.items())))


def _offsets(service: Service, ids: list[int]) -> list[int]:
    stream, at, offsets = Detokenizer(service.tokenizer.decode), 0, []
    for token in ids:
        offsets.append(at)
        at += len(stream.push(token))
    return offsets
