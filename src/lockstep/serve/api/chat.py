"""POST /v1/chat/completions: messages under the model's chat template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lockstep.serve.api.respond import EventStream, json_response, until_gone
from lockstep.serve.api.schema import ChatRequest
from lockstep.serve.api.service import Run, Service, Usage, sampling, start
from lockstep.serve.api.token_text import TokenTexts
from lockstep.serve.api.tools import parse
from lockstep.serve.params import Output, SamplingParams, join


async def chat(service: Service, body: ChatRequest, request: Request) -> Response:
    service.check_model(body.model)
    ids = await asyncio.to_thread(service.chat, body.messages, True, body.offered)
    run = await start(service, "chatcmpl", body, [ids], params(service, body, len(ids)), request.state.client)
    if body.stream:
        return EventStream(_events(run, body), run.abort)
    return json_response(await until_gone(request, _collect(run, body), run.abort))


def params(service: Service, body: ChatRequest, prompt: int) -> SamplingParams:
    """Of the engine, for a prompt of so many tokens."""
    wanted = body.max_completion_tokens or body.max_tokens
    if wanted is None:
        wanted = max(1, min(service.config.default_max_tokens, service.max_length - prompt))
    return sampling(body, max_tokens=wanted, logprobs=(body.top_logprobs or 0) if body.logprobs else None)


async def _events(run: Run, body: ChatRequest) -> AsyncIterator[dict[str, Any]]:
    counted = Usage()
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    no_usage = {"usage": None} if with_usage else {}
    for choice in range(body.n or 1):
        first: dict[str, Any] = {
            "index": choice,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if body.return_token_ids:
            first["prompt_token_ids"] = run.prompts[0]
        yield _whole(run, "chat.completion.chunk", [first], no_usage)
    held: dict[int, list[Output]] = {}
    async for index, piece in run.outputs():
        counted.add(index, piece)
        output = piece
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if body.offered:
            held.setdefault(piece.choice, []).append(piece)
            if piece.finish_reason is None:
                continue  # it may become a call: text is told once it is known what it is
            output = join(held[piece.choice])
            delta = {key: value for key, value in said(body, output).items() if value}
            for at, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = at
        shaped = {"index": output.choice, "delta": delta, **_rest(run, body, output)}
        _mark(shaped, delta)
        yield _whole(run, "chat.completion.chunk", [shaped], no_usage)
    if with_usage:
        yield _whole(run, "chat.completion.chunk", [], {"usage": counted.report(run.prompts)})


async def _collect(run: Run, body: ChatRequest) -> dict[str, Any]:
    counted = Usage()
    pieces: dict[int, list[Output]] = {}
    async for index, output in run.outputs():
        counted.add(index, output)
        pieces.setdefault(output.choice, []).append(output)
    choices = []
    for choice in sorted(pieces):
        output = join(pieces[choice])
        message = {"role": "assistant", **said(body, output), "refusal": None}
        shaped = {"index": choice, "message": message, **_rest(run, body, output)}
        _mark(shaped, message)
        if body.return_token_ids:
            shaped["prompt_token_ids"] = run.prompts[0]
        choices.append(shaped)
    return _whole(run, "chat.completion", choices, {"usage": counted.report(run.prompts)})


def said(body: ChatRequest, output: Output) -> dict[str, Any]:
    """content, and tool_calls where the text has some."""
    content, calls = parse(output.text, [tool.function.name for tool in body.tools or ()] if body.offered else [])
    return {"content": content, "tool_calls": calls} if calls else {"content": content}


def _mark(shaped: dict[str, Any], message: dict[str, Any]) -> None:
    if message.get("tool_calls") and shaped["finish_reason"] == "stop":
        shaped["finish_reason"] = "tool_calls"


def _rest(run: Run, body: ChatRequest, output: Output) -> dict[str, Any]:
    rest: dict[str, Any] = {
        "logprobs": logprobs(run.service.texts, output) if body.logprobs else None,
        "finish_reason": output.finish_reason,
    }
    if output.finish_reason is not None:
        rest["stop_reason"] = output.stop_reason
    if body.return_token_ids:
        rest["token_ids"] = list(output.token_ids)
    return rest


def logprobs(texts: TokenTexts, output: Output) -> dict[str, Any]:
    """In the form of chat completions."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token), "logprob": logprob, "bytes": texts.raw(token)}

    content = [
        {**shown(score.token, score.logprob), "top_logprobs": [shown(*best) for best in score.top]}
        for score in output.scores
    ]
    return {"content": content, "refusal": None}


def _whole(run: Run, kind: str, choices: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": run.identity,
        "object": kind,
        "created": run.created,
        "model": run.service.name,
        "choices": choices,
        "seed": run.seed,
        **more,
    }
