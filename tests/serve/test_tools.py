"""Tool calls: the parser, the template's side, and the way over HTTP with a model that is made to call."""

from __future__ import annotations

import json

import httpx
import pytest

from lockstep.serve.api.tools import parse

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '{"name": "add", "arguments": {"x": 1}}'
V3 = "<\uff5ctool\u2581calls\u2581begin\uff5c>{}<\uff5ctool\u2581calls\u2581end\uff5c>"
_BEGIN, _SEP, _END = (f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "sep", "call\u2581end"))
V3_CALL = f'{_BEGIN}function{_SEP}add\n```json\n{{"x": 1}}\n```{_END}'
V31_CALL = f'{_BEGIN}add{_SEP}{{"x": 1}}{_END}'


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", None, ["add"]),
        (f"Sure.<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "Sure.", ["add", "add"]),
        (f"<tool_call>[{CALL}, {CALL}]</tool_call>", None, ["add", "add"]),
        ('{"name": "add", "parameters": {"x": 1}}', None, ["add"]),
        ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        ('{"name": ["add"], "arguments": {}}', '{"name": ["add"], "arguments": {}}', []),
        ("3", "3", []),
        ("plain", "plain", []),
        (f"<tool_call>{CALL}", None, ["add"]),
        (f"Well.\n{V3.format(V3_CALL * 2)}", "Well.", ["add", "add"]),
        (V3.format(V31_CALL), None, ["add"]),
    ],
)
def test_parse(text, content, names):
    said, calls = parse(text, ["add"])
    assert said == content
    assert [call["function"]["name"] for call in calls] == names
    assert all(json.loads(call["function"]["arguments"]) == {"x": 1} for call in calls)


@pytest.fixture
def client(knowing):
    return knowing


def ask(client, **more):
    forced = {"choice": [f"<tool_call>{CALL}</tool_call>"]}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "1?"}], "max_tokens": 99, "tools": [TOOL]}
    return client.post("/v1/chat/completions", json={**body, "structured_outputs": forced, **more})


def test_a_call_and_its_result_go_round(client):
    choice = ask(client).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"x": 1}'}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    assert ask(client, messages=[{"role": "user", "content": "1?"}, message, result]).status_code == 200


def test_a_stream_has_the_same_call(client):
    lines = [line[6:] for line in ask(client, stream=True).text.splitlines() if line.startswith("data: {")]
    last = json.loads(lines[-1])["choices"][0]
    assert last["finish_reason"] == "tool_calls"
    assert last["delta"]["tool_calls"][0]["index"] == 0
    assert last["delta"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"x": 1}'}


def told(answer: httpx.Response) -> list[dict]:
    """The first choice of each chunk."""
    lines = (line[6:] for line in answer.text.splitlines() if line.startswith("data: {"))
    return [json.loads(line)["choices"][0] for line in lines]


def test_text_before_a_call_streams(client):
    """It is told before the call is whole, and nothing of the call is told as text."""
    forced = {"choice": [f"the quick brown fox <tool_call>{CALL}</tool_call>"]}
    chunks = told(ask(client, stream=True, structured_outputs=forced))
    texts = [chunk["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == "the quick brown fox"
    assert sum(map(bool, texts)) > 1
    assert [
        chunk["delta"]["tool_calls"][0]["function"]["name"] for chunk in chunks if "tool_calls" in chunk["delta"]
    ] == ["add"]


POINT = {
    "type": "function",
    "function": {
        "name": "p\u00f6int",
        "parameters": {
            "$defs": {"n": {"enum": [1, 2, None]}},
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/n"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "p\u00f6int"}}])
def test_a_call_is_forced(client, choice):
    """Whatever the random model would say, in the form of its template, with arguments of the tool's schema."""
    asked = {"tools": [TOOL, POINT], "tool_choice": choice, "structured_outputs": None, "seed": 5, "max_tokens": 300}
    if choice == "required":
        asked |= {"tools": [POINT], "parallel_tool_calls": False}
    answered = ask(client, **asked).json()["choices"][0]
    assert answered["finish_reason"] == "tool_calls"
    (call,) = answered["message"]["tool_calls"]
    assert call["function"]["name"] == "p\u00f6int"
    assert json.loads(call["function"]["arguments"])["x"] in (1, 2, None)


def test_without_tools_it_is_text(client):
    choice = ask(client, tool_choice="none").json()["choices"][0]
    assert choice["message"]["content"] == f"<tool_call>{CALL}</tool_call>"
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name is missing"),
        ({"tool_choice": "required"}, "and the request for another form of output"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "a function that tools does not have"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs sets messages"),
        ({"messages": [{"role": "user"}]}, "no content"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": "[]"}}]}]}, "not a JSON object"),
    ],
)  # fmt: skip
def test_wrong_requests(client, more, said):
    answer = ask(client, **more)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_a_template_without_tools_says_so(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        answer = ask(client)
    assert answer.status_code == 400
    assert "does not know tools" in answer.json()["error"]["message"]
