"""POST /v1/chat/completions: messages under the model's chat template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lockstep.serve.api.respond import EventStream, json_response, until_gone
from lockstep.serve.api.schema import ChatRequest
from lockstep.serve.api.service import Run, Service, Usage, sampling, start, structure_of
from lockstep.serve.api.speech import Speech
from lockstep.serve.api.thoughts import Expects, behind_thoughts, expects
from lockstep.serve.api.token_text import TokenTexts
from lockstep.serve.api.tools import grammar
from lockstep.serve.params import Output, SamplingParams, join
from lockstep.serve.structured import StructuredOutputs


async def chat(service: Service, body: ChatRequest, request: Request) -> Response:
    service.check_model(body.model)
    ids, params, expected = await asyncio.to_thread(asked, service, body)
    run = await start(service, "chatcmpl", body, [ids], params, request.state)
    speeches = [Speech(expected, body.names) for _ in range(params.n)]
    if body.stream:
        return EventStream(_events(run, body, speeches), run.abort)
    return json_response(await until_gone(request, _collect(run, body, speeches), run.abort))


def asked(service: Service, body: ChatRequest) -> tuple[list[int], SamplingParams, Expects]:
    """The prompt's token ids, the engine's parameters for it, and what its completions begin with. May take long."""
    prompt = service.chat(body.messages, True, body.offered, body.chat_template_kwargs)
    wanted = body.max_completion_tokens or body.max_tokens
    if wanted is None:
        wanted = max(1, min(service.config.default_max_tokens, service.max_length - len(prompt)))
    structure = forced_calls(service, body) or structure_of(body)
    structure, expected = behind_thoughts(structure, service.tokenizer, expects(service.tokenizer, prompt))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return prompt, sampling(body, max_tokens=wanted, logprobs=logprobs, structured_outputs=structure), expected


def forced_calls(service: Service, body: ChatRequest) -> StructuredOutputs | None:
    """What the completion must look like where tool_choice asks for a call."""
    functions = [tool["function"] for tool in body.offered or () if tool["function"]["name"] in body.forced]
    if not functions:
        return None
    several = body.tool_choice == "required" and body.parallel_tool_calls is not False
    return StructuredOutputs(grammar=grammar(functions, service.tokenizer.template or "", several))


async def _events(run: Run, body: ChatRequest, speeches: list[Speech]) -> AsyncIterator[dict[str, Any]]:
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
    async for index, output in run.outputs():
        counted.add(index, output)
        said = speeches[output.choice].push(output)
        calls = [{"index": at, **call} for at, call in enumerate(said.calls)]
        parts = {"reasoning_content": said.thought, "content": said.text, "tool_calls": calls}
        delta = {name: part for name, part in parts.items() if part}
        shaped = {"index": output.choice, "delta": delta, **_rest(run, body, output)}
        _mark(shaped, delta)
        yield _whole(run, "chat.completion.chunk", [shaped], no_usage)
    if with_usage:
        usage = counted.report(run.prompts, sum(speech.thought_tokens for speech in speeches))
        yield _whole(run, "chat.completion.chunk", [], {"usage": usage})


async def _collect(run: Run, body: ChatRequest, speeches: list[Speech]) -> dict[str, Any]:
    counted = Usage()
    pieces: dict[int, list[Output]] = {}
    async for index, output in run.outputs():
        counted.add(index, output)
        speeches[output.choice].push(output)
        pieces.setdefault(output.choice, []).append(output)
    choices = []
    for choice in sorted(pieces):
        output = join(pieces[choice])
        message = {"role": "assistant", **message_of(speeches[choice]), "refusal": None}
        shaped = {"index": choice, "message": message, **_rest(run, body, output)}
        _mark(shaped, message)
        if body.return_token_ids:
            shaped["prompt_token_ids"] = run.prompts[0]
        choices.append(shaped)
    usage = counted.report(run.prompts, sum(speech.thought_tokens for speech in speeches))
    return _whole(run, "chat.completion", choices, {"usage": usage})


def message_of(speech: Speech) -> dict[str, Any]:
    """content; tool_calls and reasoning_content where there are some."""
    silent = not speech.text and bool(speech.calls or speech.thought)
    message: dict[str, Any] = {"content": None if silent else speech.text}
    if speech.thought:
        message["reasoning_content"] = speech.thought
    return {**message, "tool_calls": speech.calls} if speech.calls else message


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
