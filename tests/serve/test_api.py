"""The server, as the `openai` client sees it: a process of its own on a tiny model."""

from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from lockstep.serve import Engine, SamplingParams
from tests.serve.tiny import tiny_model

HELLO = [{"role": "user", "content": "the quick"}]


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny_model())


def floats(values: list[float]) -> bytes:
    """The raw bytes of the float32 values; a value that is no float32 fails."""
    packed = struct.pack(f"{len(values)}f", *values)
    assert list(struct.unpack(f"{len(values)}f", packed)) == values
    return packed


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "lockstep"


def test_a_completion_has_the_bits_of_the_training_forward(client, model):
    answer = client.completions.create(
        model="tiny", prompt="the quick brown", max_tokens=30, seed=3, logprobs=2, echo=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    choice = answer.choices[0]
    prompt = model.tokenizer.encode("the quick brown")
    assert choice.prompt_token_ids == prompt
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is None
    teacher = model.logprobs(prompt + choice.token_ids)
    assert floats(logprobs.token_logprobs[1:]) == teacher.numpy().tobytes()
    assert choice.text == "the quick brown" + model.tokenizer.decode(choice.token_ids)
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == len(prompt) + 30
    assert logprobs.tokens[: len(prompt)] == [model.tokenizer.decode([token]) for token in prompt]
    for token, offset in list(zip(logprobs.tokens, logprobs.text_offset, strict=True))[: len(prompt)]:
        assert choice.text[offset : offset + len(token)] == token
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 30
    assert answer.usage.total_tokens == len(prompt) + 30


def test_logprobs_are_those_of_the_engine_in_this_process(client, engine):
    answer = client.completions.create(model="tiny", prompt="def f", max_tokens=25, seed=7, logprobs=0)
    (mine,) = engine.generate(["def f"], SamplingParams(max_tokens=25, seed=7, logprobs=0))
    assert answer.choices[0].text == mine.text
    assert floats(answer.choices[0].logprobs.token_logprobs) == floats(mine.logprobs)


def test_a_stream_joins_to_the_whole(client):
    asked = {
        "model": "tiny", "prompt": ["the quick", "Köln 🙂"], "max_tokens": 40, "seed": 5, "n": 2, "logprobs": 1,
        "echo": True, "stop": ["fox"], "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }  # fmt: skip
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len(whole.choices) == 4
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert [t for c in mine for t in c.token_ids] == choice.token_ids
        assert [t for c in mine for t in c.logprobs.token_logprobs] == choice.logprobs.token_logprobs
        assert [t for c in mine for t in c.logprobs.text_offset] == choice.logprobs.text_offset
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]


def test_chat_whole_and_streamed(client, model):
    asked = {
        "model": "tiny", "messages": HELLO, "max_tokens": 40, "seed": 5, "logprobs": True, "top_logprobs": 2,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert message.content == model.tokenizer.decode(whole.choices[0].token_ids)
    prompt = model.tokenizer.chat(HELLO)
    assert whole.choices[0].prompt_token_ids == prompt
    content = whole.choices[0].logprobs.content
    teacher = model.logprobs(prompt + whole.choices[0].token_ids)[len(prompt) - 1 :]
    assert floats([entry.logprob for entry in content]) == teacher.numpy().tobytes()
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert bytes(b for entry in content for b in entry.bytes).decode(errors="replace") == message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    streamed = [
        entry.logprob for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == [entry.logprob for entry in content]


def test_server_sent_events_to_the_letter(url):
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 5, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = "".join(answer.iter_text())
    events = text.split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events[:-2])


def test_prompts_as_texts_and_token_ids_in_order(client, model):
    texts = ["the", "def f", "Köln"]
    ids = [model.tokenizer.encode(text) for text in texts]
    greedy = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    together = [c.text for c in client.completions.create(prompt=texts, **greedy).choices]
    by_ids = [c.text for c in client.completions.create(prompt=ids, **greedy).choices]
    each = [client.completions.create(prompt=one, **greedy).choices[0].text for one in ids]
    assert together == by_ids == each


def test_many_clients_at_once_get_what_each_gets_alone(client):
    def ask(i):
        answer = client.completions.create(
            model="tiny", prompt=["the lazy dog " * 30, "x"][i % 2], max_tokens=20 + i, seed=i, logprobs=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        return answer.choices[0].text, answer.choices[0].logprobs.token_logprobs

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16)))
    assert together == [ask(i) for i in range(16)]


def test_usage_tells_cached_tokens(client):
    prompt = list(range(3, 203))
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "extra_body": {"cache_salt": "usage"}}
    cached = [client.completions.create(**asked).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert cached == [0, 192]


def test_best_of_gives_the_most_probable(client):
    asked = {"model": "tiny", "prompt": "the", "max_tokens": 10, "seed": 2, "logprobs": 0}
    everything = client.completions.create(**asked, n=6, extra_body={"ignore_eos": True}).choices
    best = client.completions.create(**asked, n=2, best_of=6, extra_body={"ignore_eos": True}).choices
    ranked = sorted(everything, key=lambda c: -sum(c.logprobs.token_logprobs))
    assert [c.text for c in best] == [c.text for c in ranked[:2]]
    assert [c.index for c in best] == [0, 1]
    echoed = client.completions.create(**asked, echo=True, best_of=2).choices[0].logprobs
    assert echoed.token_logprobs[:1] == [None]
    assert len(echoed.token_logprobs) == len(echoed.tokens) == len(echoed.text_offset)


def test_a_drawn_seed_is_returned(client):
    first = client.completions.create(model="tiny", prompt="fox", max_tokens=15)
    again = client.completions.create(model="tiny", prompt="fox", max_tokens=15, seed=first.seed)
    assert again.choices[0].text == first.choices[0].text


def test_content_parts_and_developer_messages(client):
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "quick"}]
    asked = {"model": "tiny", "max_tokens": 5, "temperature": 0}
    answers = [
        client.chat.completions.create(messages=[{"role": r, "content": "be"}, {"role": "user", "content": c}], **asked)
        for r, c in (("system", "the quick"), ("developer", parts))
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens


def test_an_answer_can_be_sent_back(client):
    first = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4).choices[0].message
    turn = [*HELLO, first, {"role": "user", "content": "fox"}]
    assert client.chat.completions.create(model="tiny", messages=turn, max_tokens=4).choices[0].message.content
    whole = {**first.model_dump(), "tool_calls": None, "audio": None, "function_call": None, "annotations": []}
    assert client.chat.completions.create(model="tiny", messages=[*HELLO, whole], max_tokens=4).id


def test_tokenize_and_detokenize(url, model):
    text = "the quick Köln 🙂"
    answer = httpx.post(f"{url}/tokenize", json={"prompt": text}).json()
    assert answer["tokens"] == model.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert httpx.post(f"{url}/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    chat = httpx.post(f"{url}/tokenize", json={"messages": HELLO}).json()
    assert chat["tokens"] == model.tokenizer.chat(HELLO)


def test_health_ready_and_metrics(url, client):
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/ready").json() == {"status": "ok"}
    assert [httpx.head(f"{url}/{path}").status_code for path in ("health", "ready")] == [200, 200]

    def value(name):
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    names = (
        "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count",
        "vllm:request_prompt_tokens_sum", "vllm:request_generation_tokens_sum",
    )  # fmt: skip
    before = [value(name) for name in names]
    client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=4, extra_body={"ignore_eos": True})
    assert [value(name) - b for name, b in zip(names, before, strict=True)] == [3, 4, 1, 3, 4]
    assert value("vllm:num_requests_running") == 0
    assert value("vllm:kv_cache_usage_perc") == 0
    assert value("lockstep:kv_pages_total") > 0


def test_request_ids_come_back(url):
    assert httpx.get(f"{url}/health", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    for headers in ({}, {"x-request-id": "red \x1b[31m"}):
        assert httpx.get(f"{url}/health", headers=headers).headers["x-request-id"].startswith("req-")
