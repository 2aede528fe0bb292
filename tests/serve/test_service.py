"""Parts of the API that need no server."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lockstep.config.serve import ServeConfig, byte_count
from lockstep.errors import LockstepError
from lockstep.serve.api.schema import Message
from lockstep.serve.api.service import Service
from lockstep.serve.api.token_text import TokenTexts


def service(tokenizer) -> Service:
    engine = SimpleNamespace(loaded=SimpleNamespace(tokenizer=tokenizer))
    return Service("tiny", ServeConfig(), engine, SimpleNamespace())


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[0]['content'] + 5 }}", "{{ 1 / 0 }}", None],
)
def test_a_chat_template_that_fails_is_the_request_s_error(model, template):
    broken = service(replace(model.tokenizer, template=template))
    with pytest.raises(LockstepError, match=r"template"):
        broken.chat([Message(role="user", content="hi")])


@pytest.mark.parametrize("name", ["self", "template", "names", "context", "raise_exception", "", "a b"])
def test_a_template_may_read_variables_of_any_name(model, name):
    whole = service(model.tokenizer)
    whole.engine.loaded.max_length = 100
    plain = whole.chat([Message(role="user", content="hi")])
    assert whole.chat([Message(role="user", content="hi")], variables={name: 1}) == plain


def test_token_texts_and_bytes(model):
    texts = TokenTexts(model.tokenizer)
    ids = model.tokenizer.encode("the Köln 🙂 x")
    assert b"".join(bytes(texts.raw(token)) for token in ids).decode() == "the Köln 🙂 x"
    parts = [texts.text(token) for token in model.tokenizer.encode("🙀")]
    assert len(parts) > 1
    assert "".join(part.removeprefix("bytes:") for part in parts) == "".join(f"\\x{b:02x}" for b in "🙀".encode())
    assert texts.text(min(model.tokenizer.eos_ids)) == "<|endoftext|>"


@pytest.mark.parametrize(
    ("text", "size"), [("1GiB", 2**30), ("1.5 MiB", 3 * 2**19), ("10kb", 10_000), ("7", 7), ("2TiB", 2**41)]
)
def test_sizes(text, size):
    assert byte_count(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1PiB", "-1MiB", "1 2"])
def test_wrong_sizes(text):
    with pytest.raises(ValueError, match="such as 512MiB"):
        byte_count(text)
