"""POST /v1/responses, basic form: text or messages in; reasoning, a message, calls out, whole or as typed events.

Nothing is stored: a conversation goes on by sending its items again, which the prefix cache makes cheap.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lockstep.serve.api.chat import asked, logprobs
from lockstep.serve.api.respond import EventStream, json_response, until_gone
from lockstep.serve.api.responses_schema import ResponsesRequest
from lockstep.serve.api.schema import ChatRequest
from lockstep.serve.api.service import Run, Service, Usage, start
from lockstep.serve.api.speech import Speech
from lockstep.serve.params import Output, join

Item = dict[str, Any]


async def respond(service: Service, body: ResponsesRequest, request: Request) -> Response:
    service.check_model(body.model)
    chat = await asyncio.to_thread(body.chat)
    ids, params, expected = await asyncio.to_thread(asked, service, chat)
    run = await start(service, "resp", chat, [ids], params, request.state)
    answer = _Answer(run, body, chat, Speech(expected, chat.names))
    if body.stream:
        return EventStream(answer.events(), run.abort, typed=True)
    return json_response(await until_gone(request, answer.collect(), run.abort))


class _Answer:
    """One response as it grows: its reasoning, its message, its calls."""

    def __init__(self, run: Run, body: ResponsesRequest, chat: ChatRequest, speech: Speech) -> None:
        self._run, self._body, self._chat, self._speech = run, body, chat, speech
        self._identity = run.identity.replace("-", "_")
        self._usage = Usage()
        self._numbers = count()
        self._names = {kind: f"{kind}_{secrets.token_hex(12)}" for kind in ("rs", "msg")}
        self._open: list[str] = []
        """What was begun of these two, in order; the last is not closed yet."""

    async def collect(self) -> dict[str, Any]:
        pieces = []
        async for index, output in self._run.outputs():
            self._usage.add(index, output)
            self._speech.push(output)
            pieces.append(output)
        return self._whole(self._items(join(pieces)), pieces[-1])

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """OpenAI's typed events. Calls come once the answer is whole."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._whole([], None))
        pieces = []
        async for index, output in self._run.outputs():
            self._usage.add(index, output)
            pieces.append(output)
            said = self._speech.push(output)
            for kind, delta in (("rs", said.thought), ("msg", said.text)):
                for event in self._grow(kind, delta, output) if delta else ():
                    yield event
        whole = join(pieces)
        items = self._items(whole)
        for event in self._rest(items):
            yield event
        done = self._whole(items, whole)
        yield self._event(f"response.{done['status']}", response=done)

    def _grow(self, kind: str, delta: str, output: Output) -> list[dict[str, Any]]:
        """More of the reasoning, or of the message."""
        events = []
        if kind not in self._open:
            if self._open:
                events += self._close(self._reasoning("completed"), 0)
            events += self._begin(kind, len(self._open))
            self._open.append(kind)
        more = {"logprobs": self._scores(output)} if kind == "msg" else {}
        told = "output_text" if kind == "msg" else "reasoning_text"
        place = self._place(kind, len(self._open) - 1)
        return [*events, self._event(f"response.{told}.delta", **place, delta=delta, **more)]

    def _rest(self, items: list[Item]) -> list[dict[str, Any]]:
        """What is still to be told of the items once they are known."""
        events = []
        for at, item in enumerate(items):
            if item["type"] == "function_call":
                events += self._call(item, at)
            elif at == len(self._open) - 1:
                events += self._close(item, at)
            elif at >= len(self._open):
                events += [*self._begin("msg" if item["type"] == "message" else "rs", at), *self._close(item, at)]
        return events

    def _begin(self, kind: str, at: int) -> list[dict[str, Any]]:
        item = self._message("", [], "in_progress") if kind == "msg" else self._reasoning("in_progress")
        (part,) = item["content"]
        return [
            self._event("response.output_item.added", output_index=at, item={**item, "content": []}),
            self._event("response.content_part.added", **self._place(kind, at), part={**part, "text": ""}),
        ]

    def _close(self, item: Item, at: int) -> list[dict[str, Any]]:
        (part,) = item["content"]
        kind, told = ("msg", "output_text") if item["type"] == "message" else ("rs", "reasoning_text")
        place, more = self._place(kind, at), {"logprobs": part["logprobs"]} if kind == "msg" else {}
        return [
            self._event(f"response.{told}.done", **place, text=part["text"], **more),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=at, item=item),
        ]

    def _call(self, item: Item, at: int) -> list[dict[str, Any]]:
        place = {"item_id": item["id"], "output_index": at}
        begun = {**item, "status": "in_progress", "arguments": ""}
        done = {"arguments": item["arguments"], "name": item["name"]}
        return [
            self._event("response.output_item.added", output_index=at, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=item["arguments"]),
            self._event("response.function_call_arguments.done", **place, **done),
            self._event("response.output_item.done", output_index=at, item=item),
        ]

    def _place(self, kind: str, at: int) -> dict[str, Any]:
        return {"item_id": self._names[kind], "output_index": at, "content_index": 0}

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **more}

    def _items(self, output: Output) -> list[Item]:
        speech = self._speech
        status = "incomplete" if output.finish_reason == "length" else "completed"
        items = [self._reasoning(status if not speech.text else "completed")] if speech.thought else []
        if speech.text or not (speech.thought or speech.calls):
            items.append(self._message(speech.text, self._scores(output)[speech.thought_tokens :], status))
        for call in speech.calls:
            named = {"id": f"fc_{secrets.token_hex(12)}", "call_id": call["id"], "status": status}
            items.append({"type": "function_call", **named, **call["function"]})
        return items

    def _message(self, text: str, scores: list[Any], status: str) -> Item:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}
        about = {"type": "message", "id": self._names["msg"], "status": status, "role": "assistant"}
        return {**about, "content": [part]}

    def _reasoning(self, status: str) -> Item:
        part = {"type": "reasoning_text", "text": self._speech.thought}
        return {"type": "reasoning", "id": self._names["rs"], "status": status, "summary": [], "content": [part]}

    def _scores(self, output: Output) -> list[Any]:
        return logprobs(self._run.service.texts, output)["content"] if self._chat.logprobs else []

    def _whole(self, items: list[Item], output: Output | None) -> dict[str, Any]:
        body, length = self._body, output is not None and output.finish_reason == "length"
        return {
            "id": self._identity,
            "object": "response",
            "created_at": self._run.created,
            "status": "in_progress" if output is None else "incomplete" if length else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if length else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._run.service.name,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": None,
            "seed": self._run.seed,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": body.form},
            "tool_choice": body.choice,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if output is None else self._counted(),
            "user": body.user,
        }

    def _counted(self) -> dict[str, Any]:
        usage = self._usage.report(self._run.prompts, self._speech.thought_tokens)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
