"""/v1/responses as the `openai` client sees it; what it answers is what chat completions answer."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import httpx
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from lockstep.serve.api.responses import _Answer
from lockstep.serve.api.responses_schema import ResponsesRequest
from lockstep.serve.api.speech import Speech
from lockstep.serve.params import Output

GREEDY = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def chat(client, messages, **more):
    return client.chat.completions.create(model="tiny", temperature=0, max_tokens=12, messages=messages, **more)


def test_a_text_is_a_message_of_the_user(client):
    answer = client.responses.create(**GREEDY, input="the quick", instructions="be brief")
    same = chat(client, [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick"}])
    assert answer.output_text == same.choices[0].message.content
    assert answer.status == ("incomplete" if same.choices[0].finish_reason == "length" else "completed")
    assert answer.usage.input_tokens == same.usage.prompt_tokens
    assert answer.usage.output_tokens == same.usage.completion_tokens
    assert answer.usage.total_tokens == same.usage.total_tokens
    assert answer.instructions == "be brief"
    assert answer.output[0].role == "assistant"


def test_items_of_all_kinds_and_a_second_turn(client):
    first = client.responses.create(**GREEDY, input="the quick")
    turn = [{"role": "user", "content": "the quick"}, *first.output, {"role": "user", "content": "fox"}]
    second = client.responses.create(**GREEDY, input=turn)
    said = first.output_text
    messages = [
        {"role": "user", "content": "the quick"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "fox"},
    ]
    assert second.output_text == chat(client, messages).choices[0].message.content
    parts = [
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "the "}, {"type": "input_text", "text": "dog"}],
        }
    ]
    same = chat(client, [{"role": "system", "content": "the dog"}])
    assert client.responses.create(**GREEDY, input=parts).output_text == same.choices[0].message.content


def test_typed_events_in_order(client):
    asked = {
        "model": "tiny", "input": "the quick", "max_output_tokens": 20, "top_logprobs": 2,
        "include": ["message.output_text.logprobs"], "extra_body": {"seed": 3},
    }  # fmt: skip
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 1
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        f"response.{whole.status}",
    ]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage == whole.usage
    ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert ids == {events[-1].response.output[0].id}
    scores = whole.output[0].content[0].logprobs
    assert len(scores) == whole.usage.output_tokens
    assert all(len(score.top_logprobs) == 2 for score in scores)
    streamed = [score.logprob for e in events if e.type == "response.output_text.delta" for score in e.logprobs]
    assert streamed == [score.logprob for score in scores][: len(streamed)]


def test_events_have_their_names(url):
    with httpx.stream("POST", f"{url}/v1/responses", json={**GREEDY, "input": "a", "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = "".join(answer.iter_text()).strip().split("\n\n")
    for block in blocks:
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_a_schema_is_followed(client):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    answer = client.responses.create(model="tiny", input="a", text=form, max_output_tokens=60)
    assert answer.status == "completed"
    assert set(json.loads(answer.output_text)) == {"a"}
    assert answer.text.format.name == "x"


TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
PIECES = [
    "<thi",
    "nk>\nhm",
    ", 3?",
    "\n</think>",
    "\n\nsu",
    "re ",
    '<tool_call>{"name": "add", ',
    '"arguments": {"a": 1}}</tool_call>',
]


def answer_of(pieces: list[str]) -> _Answer:
    """Without a server: the tiny model thinks and calls nothing."""
    body = ResponsesRequest(model="tiny", input="1 + 2?", tools=TOOLS)
    service = SimpleNamespace(name="tiny", texts=None)
    run = SimpleNamespace(identity="resp-1", created=0, seed=0, prompts=[[1]], service=service)
    ends = [sum(map(len, pieces[:i])) for i in range(len(pieces))]

    async def outputs():
        for i, piece in enumerate(pieces):
            last = i + 1 == len(pieces)
            yield 0, Output(0, 0, piece, (i,), text_offsets=(ends[i],), finish_reason="stop" if last else None)

    run.outputs = outputs
    chat = body.chat()
    return _Answer(run, body, chat, Speech("may", chat.names))


def test_reasoning_message_and_calls_are_items():
    whole = asyncio.run(answer_of(PIECES).collect())
    reasoning, message, call = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm, 3?"}]
    assert message["content"][0]["text"] == "sure"
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"a": 1})
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    back = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    turn = [{"role": "user", "content": "1 + 2?"}, reasoning, message, call, back]
    again = ResponsesRequest(model="tiny", input=turn).chat().messages
    assert [m.role for m in again] == ["user", "assistant", "tool"]
    assert (again[1].reasoning_content, again[1].content) == ("hm, 3?", "sure")
    assert again[1].tool_calls[0].id == again[2].tool_call_id == call["call_id"]


def test_events_of_reasoning_message_and_calls():
    async def told():
        return [event async for event in answer_of(PIECES).events()]

    events = asyncio.run(told())
    kinds = [event["type"].removeprefix("response.") for event in events]
    opened, closed = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds == [
        "created", "in_progress",
        *opened, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *closed,
        *opened, "output_text.delta", "output_text.delta", "output_text.done", *closed, *call, "completed",
    ]  # fmt: skip
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    items = events[-1]["response"]["output"]
    for at, name in enumerate(("reasoning_text", "output_text")):
        mine = [event for event in events if event["type"].startswith(f"response.{name}")]
        assert {(event["item_id"], event["output_index"]) for event in mine} == {(items[at]["id"], at)}
        assert "".join(event.get("delta", "") for event in mine) == items[at]["content"][0]["text"] == mine[-1]["text"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"previous_response_id": "resp_1"}, "this server stores none"),
        ({"input": []}, "input is a list of 0: give at least 1"),
        ({"input": None}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input has reasoning alone"),
        ({"input": [{"type": "web_search_call"}]}, "its type must be message"),
        ({"tool_choice": "required"}, "tool_choice asks for a call of a function that tools does not have"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "read text only"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "["}]}, "not a JSON object"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type is \"web_search\": give 'function'"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"max_output_tokens": 5000}, "maximum context length is 1024 tokens"),
        ({"background": True}, "background is true"),
        ({"messages": []}, "not a parameter of this endpoint but of /v1/chat/completions"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name is missing"),
    ],
)
def test_what_is_not_offered_is_told(url, more, said):
    answer = httpx.post(f"{url}/v1/responses", json={"model": "tiny", "input": "a", **more})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
