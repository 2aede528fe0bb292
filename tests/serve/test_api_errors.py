"""Whatever is wrong with a request is a 4xx with OpenAI's error object and a sentence that helps."""

from __future__ import annotations

import httpx
import openai
import pytest
from pydantic import ValidationError

from lockstep.serve.api.schema import CompletionRequest

TEXT = {"model": "tiny", "prompt": "hi"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}

WRONG_COMPLETIONS = [
    ({"model": "tiny"}, 400, "prompt is missing"),
    ({"prompt": "hi"}, 400, "model is missing"),
    ({**TEXT, "model": 5}, 400, "model is 5"),
    ({**TEXT, "model": "gpt-4"}, 404, "there is no model 'gpt-4'"),
    ({**TEXT, "n": 0}, 400, "n is 0: input should be greater than or equal to 1"),
    ({**TEXT, "temperature": -1}, 400, "temperature is -1"),
    ({**TEXT, "temperature": "hot"}, 400, 'temperature is "hot": input should be a valid number'),
    ({**TEXT, "temperature": True}, 400, "temperature is true"),
    ({**TEXT, "top_p": 2}, 400, "top_p is 2"),
    ({**TEXT, "max_tokens": -5}, 400, "max_tokens is -5"),
    ({**TEXT, "max_tokens": 1.5}, 400, "max_tokens is 1.5"),
    ({**TEXT, "max_tokens": 0}, 400, "max_tokens is 0"),
    ({**TEXT, "max_tokens": 2000}, 400, "maximum context length is 1024 tokens"),
    ({**TEXT, "max_tokens": 10**30}, 400, "max_tokens"),
    ({**TEXT, "prompt": [5] * 1024}, 400, "maximum context length is 1024 tokens"),
    ({**TEXT, "prompt": ""}, 400, "the prompt has no tokens"),
    ({**TEXT, "prompt": []}, 400, "prompt is a list of 0"),
    ({**TEXT, "prompt": [[]]}, 400, "prompt"),
    ({**TEXT, "prompt": {"a": 1}}, 400, "prompt is an object"),
    ({**TEXT, "prompt": [5, "a"]}, 400, "prompt is"),
    ({**TEXT, "prompt": [99999]}, 400, "token id 99999"),
    ({**TEXT, "prompt": [-1]}, 400, "prompt"),
    ({**TEXT, "temperatur": 1}, 400, "temperatur is not a parameter of this endpoint: did you mean temperature?"),
    ({**TEXT, "logit_bias": {"a": 1}}, 400, "token ids, written as strings of digits"),
    ({**TEXT, "logit_bias": {"5": 101}}, 400, "logit_bias"),
    ({**TEXT, "logit_bias": {"99999": 1}}, 400, "token id 99999"),
    ({**TEXT, "logprobs": 50}, 400, "logprobs is 50"),
    ({**TEXT, "stop": ""}, 400, "empty string"),
    ({**TEXT, "stop": ["a"] * 99}, 400, "stop"),
    ({**TEXT, "stop": [1]}, 400, "stop"),
    ({**TEXT, "best_of": 1, "n": 2}, 400, "best_of must be at least n"),
    ({**TEXT, "best_of": 2, "stream": True}, 400, "best_of above n cannot be streamed"),
    ({**TEXT, "suffix": "x"}, 400, 'suffix is "x": it is not offered here; remove it.'),
    ({**TEXT, "prompt": ["a"] * 2000}, 400, "prompt is a list of 2000: send at most 1024 at once."),
    ({**TEXT, "prompt": [[1]] * 2000}, 400, "prompt is a list of 2000: send at most 1024 at once."),
    ({**TEXT, "tools": []}, 400, "tools is not a parameter of this endpoint but of /v1/chat/completions: remove it"),
    ({**TEXT, "prompt": 5}, 400, "prompt is 5: give a text, a list of texts, a list of token ids"),
    ({**TEXT, "seed": 2**70}, 400, "seed"),
    ({**TEXT, "stream_options": {"include_usage": True}}, 400, "stream_options goes with stream"),
    ({**TEXT, "stream": "yes"}, 400, 'stream is "yes"'),
    ({**TEXT, "repetition_penalty": 0}, 400, "repetition_penalty is 0"),
    ([1, 2], 400, "must be a JSON object"),
    ("text", 400, "must be a JSON object"),
    (None, 400, "must be a JSON object"),
]
WRONG_CHATS = [
    ({**CHAT, "reasoning_effort": "low"}, 400, 'reasoning_effort is "low": it is not offered here'),
    ({**CHAT, "resonse_format": {}}, 400, "did you mean response_format?"),
    ({**CHAT, "answer_quickly": True}, 400, "answer_quickly is not a parameter of this endpoint: remove it."),
    ({**CHAT, "messages": []}, 400, "messages is a list of 0"),
    ({**CHAT, "messages": "hi"}, 400, 'messages is "hi"'),
    ({**CHAT, "messages": CHAT["messages"] * 2049}, 400, "messages is a list of 2049: send at most 2048 at once."),
    ({**CHAT, "messages": [{"role": "robot", "content": "hi"}]}, 400, 'messages.0.role is "robot"'),
    ({**CHAT, "messages": [{"content": "hi"}]}, 400, "messages.0.role is missing"),
    ({**CHAT, "messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content is 5"),
    (
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        'messages.0.content.0.type is "image_url": models here read text only; send parts of type text.',
    ),
    ({**CHAT, "messages": [{"role": "user", "content": [{"type": {}}]}]}, 400, "messages.0.content.0.type"),
    ({**CHAT, "top_logprobs": 2}, 400, "top_logprobs goes with logprobs"),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs is 21"),
    ({**CHAT, "logprobs": 3}, 400, "logprobs is 3"),
    ({**CHAT, "max_tokens": 0}, 400, "max_tokens is 0"),
    ({**CHAT, "max_completion_tokens": 5000}, 400, "maximum context length is 1024 tokens"),
    ({**CHAT, "response_format": {"type": "xml"}}, 400, "response_format is an object"),
    ({**CHAT, "tools": [{"type": "function"}]}, 400, "tools"),
    ({**CHAT, "model": "x"}, 404, "there is no model 'x'"),
]


def check(answer: httpx.Response, status: int, said: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert said in error["message"]
    assert error["message"].endswith((".", "?"))


@pytest.mark.parametrize(("body", "status", "said"), WRONG_COMPLETIONS)
def test_wrong_completions(url, body, status, said):
    check(httpx.post(f"{url}/v1/completions", json=body), status, said)


@pytest.mark.parametrize(("body", "status", "said"), WRONG_CHATS)
def test_wrong_chats(url, body, status, said):
    check(httpx.post(f"{url}/v1/chat/completions", json=body), status, said)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"model": "tiny", "prompt": ', "not valid JSON"),
        (
            b'{"model": "tiny", "prompt": "hi", "temperature": NaN}',
            "temperature is NaN: input should be a finite number",
        ),
        (b'{"model": "tiny", "prompt": "hi", "top_p": Infinity}', "top_p is Infinity"),
        (b'{"model": "tiny", "prompt": "hi", "logit_bias": {"5": NaN}}', "logit_bias"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "surrogate"),
        (b'{"model": "\\ud800", "prompt": "hi"}', "surrogate"),
        (b'{"model": "tiny", "prompt": "hi", "\\ud800": 1}', "the body is"),
        (b'{"model": "tiny", "prompt": "hi", "max_tokens": 1e400}', "max_tokens"),
        (b"\xff\xfe", "."),
        (b"[" * 100_000, "."),
        (b'{"model": "tiny", "prompt": ' + b"9" * 5000 + b"}", "."),
        (b"", "."),
    ],
)
def test_broken_bodies(url, raw, said):
    check(httpx.post(f"{url}/v1/completions", content=raw, headers={"content-type": "application/json"}), 400, said)


def test_a_wrong_content_type(url):
    body = b'{"model": "tiny", "prompt": "hi"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = httpx.post(f"{url}/v1/completions", content=body, headers={"content-type": kind})
        check(answer, 400, "sent with Content-Type: application/json")


def test_paths_and_methods(url):
    check(httpx.get(f"{url}/v1/nothing"), 404, "there is no such path")
    check(httpx.get(f"{url}/v1/completions"), 405, "does not take this method")
    check(httpx.get(f"{url}/v1/models/other"), 404, "there is no model 'other'")
    check(httpx.post(f"{url}/tokenize", json={}), 400, "give either prompt or messages")
    check(httpx.post(f"{url}/detokenize", json={"tokens": [-1]}), 400, "tokens.0 is -1")


def test_the_openai_client_raises_its_own_errors(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="n is 0"):
        client.completions.create(model="tiny", prompt="hi", n=0)
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=CHAT["messages"])
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[5] * 2000)
    assert caught.value.code == "context_length_exceeded"


def test_unknown_tokens_are_named(url):
    answer = httpx.post(f"{url}/detokenize", json={"tokens": [5, 320, 2**31 - 1]})
    check(answer, 400, "token id 320 is not in the vocabulary: ids go from 0 to 319")


@pytest.mark.parametrize("more", [{"prompt": [[5]] * 3000}, {"prompt": ["a"] * 3000}, {"stop_token_ids": ["a"] * 3000}])
def test_of_a_long_list_one_mistake_is_told_not_one_for_each_item(more):
    with pytest.raises(ValidationError) as told:
        CompletionRequest.model_validate({"model": "tiny", "prompt": "a", **more})
    assert told.value.error_count() <= 4


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(url):
    """Two million characters would take seconds; whoever asks meanwhile is answered."""
    for path, asked in (
        ("v1/completions", {"prompt": "the quick " * 200_000}),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "the quick " * 200_000}]}),
        ("v1/embeddings", {"input": "the quick " * 200_000}),
        ("tokenize", {"prompt": "the quick " * 200_000}),
        ("tokenize", {"messages": [{"role": "user", "content": "the quick " * 200_000}]}),
    ):
        answer = httpx.post(f"{url}/{path}", json={"model": "tiny", **asked}, timeout=60)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "characters each, but the prompt has 2000" in answer.json()["error"]["message"]


def test_token_ids_that_cannot_fit_are_refused_before_they_are_read(url):
    """Whether they are in the vocabulary is looked up for as many as fit."""
    ids = [2**31 - 1] * 100_000
    for path, asked in (
        ("v1/completions", {"prompt": ids}),
        ("v1/completions", {"prompt": [[5], ids]}),
        ("v1/embeddings", {"input": [ids]}),
        ("detokenize", {"tokens": ids}),
    ):
        answer = httpx.post(f"{url}/{path}", json={"model": "tiny", **asked}, timeout=60)
        check(answer, 400, "maximum context length is 1024 tokens, but 100000 were sent: send fewer.")
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "asked", "wrong"),
    [
        ("completions", {"prompt": "a" * 20_000, "temperature": -1}, "temperature is -1"),
        ("completions", {"prompt": "a" * 20_000, "temperatur": 1}, "did you mean temperature?"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a" * 20_000}, {"role": "x"}]},
            "messages.1.role",
        ),
    ],
)
def test_what_is_wrong_with_a_long_body_is_told_as_of_a_short_one(url, path, asked, wrong):
    check(httpx.post(f"{url}/v1/{path}", json={"model": "tiny", **asked}), 400, wrong)
    raw = b'{"model": "tiny", "prompt": "' + b"a" * 20_000
    check(httpx.post(f"{url}/v1/{path}", content=raw, headers={"content-type": "application/json"}), 400, "not valid")


def test_the_server_is_well_after_all_that(url):
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.post(f"{url}/v1/completions", json={**TEXT, "max_tokens": 2}).status_code == 200


def test_the_schema_tells_the_errors(url):
    document = httpx.get(f"{url}/openapi.json").json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert {"200", "4XX", "5XX"} == set(operation["responses"]), path
