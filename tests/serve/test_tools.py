"""Tool calls: the parser, the template's side, and the way over HTTP with a model that is made to call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from lockstep.config.serve import ServeConfig
from lockstep.model.model import Model
from lockstep.serve.api import create_app
from lockstep.serve.api.tools import parse
from lockstep.serve.replicas import Replicas
from lockstep.serve.spec import engine_spec
from tests.serve.running import wait_for

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '{"name": "add", "arguments": {"x": 1}}'
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}\n{% endfor %}"
)


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
    ],
)
def test_parse(text, content, names):
    said, calls = parse(text, ["add"])
    assert said == content
    assert [call["function"]["name"] for call in calls] == names
    assert all(json.loads(call["function"]["arguments"]) == {"x": 1} for call in calls)


@contextmanager
def served(directory: Path) -> Iterator[TestClient]:
    """The application around an engine process of its own."""
    with TestClient(create_app(Replicas(engine_spec(str(directory), ServeConfig())), "tiny", ServeConfig())) as client:
        wait_for(lambda: client.get("/ready").status_code == 200, 60)
        yield client


@pytest.fixture(scope="module")
def client(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("knowing") / "model"
    Model(model.decoder, replace(model.tokenizer, template=TEMPLATE), model.ops, model.dtype).save(directory)
    with served(directory) as client:
        yield client


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


def test_without_tools_it_is_text(client):
    choice = ask(client, tool_choice="none").json()["choices"][0]
    assert choice["message"]["content"] == f"<tool_call>{CALL}</tool_call>"
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name is missing"),
        ({"tool_choice": "required"}, "tool_choice"),
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
