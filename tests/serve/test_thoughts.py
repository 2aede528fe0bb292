"""Thoughts apart from answers: the same however the text is cut, counted in tokens, and before a structure."""

from __future__ import annotations

import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.serve.api.thoughts import Thoughts, expects
from lockstep.serve.structured import Guides, StructuredOutputs
from tests.serve.knowing import thinking

PARTS = st.lists(st.sampled_from(["<think>", "</think>", "</th", "<th", "\n", " ", "a", "b <"]), max_size=8)


@pytest.mark.parametrize(
    ("expected", "text", "thought", "answer"),
    [
        ("may", "<think>\nhm\n</think>\n\nyes\n", "hm", "yes\n"),
        ("may", "\n<think>\n\n</think>\n\nyes", "", "yes"),
        ("may", "\n no <think>x</think>", "", "\n no <think>x</think>"),
        ("may", "<think>cut </thi", "cut </thi", ""),
        ("may", "<thi", "", "<thi"),
        ("begun", "hm</think>yes", "hm", "yes"),
        ("begun", "hm", "hm", ""),
        ("none", " <think>x</think>", "", " <think>x</think>"),
    ],
)
def test_the_two_sides(expected, text, thought, answer):
    assert Thoughts(expected).push(text, last=True) == (thought, answer)


@given(PARTS.map("".join), st.sampled_from(["none", "may", "begun"]), st.lists(st.integers(1, 4)))
@settings(max_examples=400)
def test_any_cut_gives_the_same(text, expected, sizes):
    whole, cut = Thoughts(expected), Thoughts(expected)
    said, pieces, at = whole.push(text, last=True), [], 0
    for size in sizes:
        pieces.append(cut.push(text[at : at + size]))
        at += size
    pieces.append(cut.push(text[at:], last=True))
    assert tuple(map("".join, zip(*pieces, strict=True))) == said
    places = range(len(text))
    assert cut.tokens(places) == whole.tokens(places)
    if expected == "begun" and "</think>" in text:
        assert whole.tokens(places) == text.index("</think>") + len("</think>")


@pytest.fixture
def client(knowing) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=knowing)


def ask(client, extra_body=None, **more):
    """The model is made to think: the closing mark is likely, so a thought ends soon."""
    bias = {"319": 9, "0": -100, "2": -100}
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "the?"}], "max_tokens": 40, "seed": 1}
    extra = {"chat_template_kwargs": {"enable_thinking": True}, **(extra_body or {})}
    return client.chat.completions.create(**{**asked, "logit_bias": bias, "extra_body": extra, **more})


def test_what_a_prompt_lets_come(model):
    tokenizer = thinking(model.tokenizer)
    said = [{"role": "user", "content": "<think>"}]
    assert expects(tokenizer, tokenizer.chat(said, enable_thinking=True)) == "begun"
    assert expects(tokenizer, tokenizer.chat(said)) == "none"
    assert expects(tokenizer, tokenizer.encode("user: the")) == "may"
    assert expects(model.tokenizer, model.tokenizer.chat(said)) == "none"


def test_a_thought_is_told_apart(client):
    whole = ask(client)
    message = whole.choices[0].message
    assert message.reasoning_content
    assert "think>" not in message.reasoning_content
    counted = whole.usage.completion_tokens_details.reasoning_tokens
    assert 0 < counted < whole.usage.completion_tokens
    deltas = [chunk.choices[0].delta for chunk in ask(client, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content
    again = [{"role": "user", "content": "a"}, message.model_dump(), {"role": "user", "content": "b"}]
    longer = ask(client, messages=again).usage.prompt_tokens
    assert (
        longer
        > ask(
            client, messages=[again[0], {"role": "assistant", "content": message.content}, again[2]]
        ).usage.prompt_tokens
    )
    off = ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert not hasattr(off.choices[0].message, "reasoning_content")
    assert off.usage.completion_tokens_details.reasoning_tokens == 0


def test_responses_read_the_template_s_variables_too(client):
    asked = {"model": "tiny", "input": "the?", "max_output_tokens": 4}
    counts = [
        client.responses.create(
            **asked, extra_body={"chat_template_kwargs": {"enable_thinking": on}}
        ).usage.input_tokens
        for on in (True, False)
    ]
    assert counts[0] != counts[1]


def test_a_structure_begins_behind_the_thought(client):
    """What follows the thought is the structure and nothing else; without a thought it is all."""
    form = {"structured_outputs": {"choice": ["the lazy dog"]}}
    message = ask(client, extra_body=form).choices[0].message
    assert message.reasoning_content
    assert message.content == "the lazy dog"
    off = ask(client, extra_body={**form, "chat_template_kwargs": {"enable_thinking": False}})
    assert off.choices[0].message.content == "the lazy dog"


def test_a_thought_does_not_end_the_completion(model):
    """Inside it every token is free but those that end it all; the structure follows the token that closes it."""
    guides = Guides(model.tokenizer, model.config.vocab_size, frozenset({0, 2}))
    guide = guides.guide(StructuredOutputs(choice=("the",), opens=318, closes=319))
    (the,) = model.tokenizer.encode("the")
    first = guide.allowed()
    assert first[318]
    assert first[the]
    assert not first[319]
    guide.accept(318)
    assert set(np.flatnonzero(~guide.allowed())) == {0, 2}
    for token in (5, 318, 319):
        assert not guide.finished
        guide.accept(token)
    assert guide.allowed()[the]
    assert not guide.allowed()[318]
    guide.accept(the)
    assert guide.finished
