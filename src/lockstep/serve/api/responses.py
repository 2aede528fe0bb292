"""POST /v1/responses, basic form: text or messages in, a message or function calls out, whole or as typed events.

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

from lockstep.serve.api.chat import logprobs, params, said
from lockstep.serve.api.respond import EventStream, json_response, until_gone
from lockstep.serve.api.responses_schema import ResponsesRequest
from lockstep.serve.api.schema import ChatRequest
from lockstep.serve.api.service import Run, Service, Usage, start
from lockstep.serve.params import Output, join

Item = dict[str, Any]


async def respond(service: Service, body: ResponsesRequest, request: Request) -> Response:
    service.check_model(body.model)
    chat = body.chat()
    ids = await asyncio.to_thread(service.chat, chat.messages, True, chat.offered)
    run = await start(service, "resp", chat, [ids], params(service, chat, len(ids)), request.state.client)
    answer = _Answer(run, body, chat)
    if body.stream:
        return EventStream(answer.events(), run.abort, typed=True)
    return json_response(await until_gone(request, answer.collect(), run.abort))


class _Answer:
    """One response as it grows."""

    def __init__(self, run: Run, body: ResponsesRequest, chat: ChatRequest) -> None:
        self._run, self._body, self._chat = run, body, chat
        self._identity = run.identity.replace("-", "_")
        self._usage = Usage()
        self._numbers = count()

    async def collect(self) -> dict[str, Any]:
        pieces = []
        async for index, output in self._run.outputs():
            self._usage.add(index, output)
            pieces.append(output)
        whole = join(pieces)
        return self._whole(self._items(whole), whole)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """OpenAI's typed events. With tools, items come once the answer is whole: text may become a call."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._whole([], None))
        message, pieces, begun = self._message("", []), [], False
        place = {"item_id": message["id"], "output_index": 0, "content_index": 0}
        async for index, output in self._run.outputs():
            self._usage.add(index, output)
            pieces.append(output)
            if self._chat.offered:
                continue
            if not begun:
                begun = True
                for event in self._open(message, place):
                    yield event
            if output.text:
                yield self._event(
                    "response.output_text.delta", **place, delta=output.text, logprobs=self._scores(output)
                )
        whole = join(pieces)
        items = self._items(whole)
        if begun:
            items[0]["id"] = message["id"]
            for event in self._close(items[0], place):
                yield event
        else:
            for at, item in enumerate(items):
                for event in self._at_once(item, at):
                    yield event
        done = self._whole(items, whole)
        yield self._event(f"response.{done['status']}", response=done)

    def _open(self, message: Item, place: dict[str, Any]) -> list[dict[str, Any]]:
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        begun = {**message, "status": "in_progress", "content": []}
        return [
            self._event("response.output_item.added", output_index=place["output_index"], item=begun),
            self._event("response.content_part.added", **place, part=empty),
        ]

    def _close(self, item: Item, place: dict[str, Any]) -> list[dict[str, Any]]:
        (part,) = item["content"]
        return [
            self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"]),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=place["output_index"], item=item),
        ]

    def _at_once(self, item: Item, at: int) -> list[dict[str, Any]]:
        """The events of an item that is whole already."""
        if item["type"] == "message":
            place = {"item_id": item["id"], "output_index": at, "content_index": 0}
            (part,) = item["content"]
            delta = {"delta": part["text"], "logprobs": part["logprobs"]}
            told = self._event("response.output_text.delta", **place, **delta)
            return [*self._open(item, place), told, *self._close(item, place)]
        place = {"item_id": item["id"], "output_index": at}
        begun = {**item, "status": "in_progress", "arguments": ""}
        done = {"arguments": item["arguments"], "name": item["name"]}
        return [
            self._event("response.output_item.added", output_index=at, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=item["arguments"]),
            self._event("response.function_call_arguments.done", **place, **done),
            self._event("response.output_item.done", output_index=at, item=item),
        ]

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **more}

    def _items(self, output: Output) -> list[Item]:
        message = said(self._chat, output)
        status = "incomplete" if output.finish_reason == "length" else "completed"
        calls = [
            {
                "type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": call["id"], "status": status,
                **call["function"],
            }
            for call in message.get("tool_calls", ())
        ]  # fmt: skip
        if message["content"] or not calls:
            return [self._message(message["content"] or "", self._scores(output), status), *calls]
        return calls

    def _message(self, text: str, scores: list[Any], status: str = "completed") -> Item:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}
        identity = f"msg_{secrets.token_hex(12)}"
        return {"type": "message", "id": identity, "status": status, "role": "assistant", "content": [part]}

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
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if output is None else self._counted(),
            "user": body.user,
        }

    def _counted(self) -> dict[str, Any]:
        usage = self._usage.report(self._run.prompts)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
