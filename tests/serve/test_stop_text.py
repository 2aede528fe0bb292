"""Incremental text: joined pieces are the whole decoding, no half characters, no partial stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lockstep.model.tokenizer import train_bpe
from lockstep.serve.text import Detokenizer, StopStrings, TextStream
from tests.serve.tiny import TEXT

TOKENIZER = train_bpe(iter(TEXT * 20), 320)


def as_bytes(ids: list[int]) -> str:
    """A tokenizer whose tokens are single bytes."""
    return bytes(ids).decode(errors="replace")


def pieces(decode, ids):
    stream = Detokenizer(decode)
    return [stream.push(token) for token in ids] + [stream.flush()]


@given(st.lists(st.integers(0, 255), max_size=80))
@settings(max_examples=300)
def test_any_bytes_join_to_their_decoding(ids):
    assert "".join(pieces(as_bytes, ids)) == as_bytes(ids)


@given(st.lists(st.sampled_from([0x80, 0xE2, 0xF0, 0x9F, 0x41]), min_size=30, max_size=200))
@settings(max_examples=200)
def test_long_runs_of_broken_bytes_join_too(ids):
    assert "".join(pieces(as_bytes, ids)) == as_bytes(ids)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60))
def test_any_tokens_join_to_their_decoding(ids):
    assert "".join(pieces(TOKENIZER.decode, ids)) == TOKENIZER.decode(ids)


@given(st.text(max_size=40))
def test_valid_text_never_shows_half_a_character(text):
    told = pieces(as_bytes, list(text.encode()))
    assert "".join(told) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in told)


def test_the_window_stays_short():
    seen = []

    def decode(ids):
        seen.append(len(ids))
        return as_bytes(ids)

    stream = Detokenizer(decode)
    for token in [0x41] * 500 + [0x80] * 500:
        stream.push(token)
    assert max(seen) < 60


def test_special_tokens_without_text_do_not_pile_up():
    seen = []

    def decode(ids):
        seen.append(len(ids))
        return TOKENIZER.decode(ids)

    stream = Detokenizer(decode)
    for token in [*TOKENIZER.encode("the"), *[0] * 300]:
        stream.push(token)
    assert max(seen) < 60


def sentencepiece_like() -> Backend:
    """Words with a leading mark for the space, which the decoder strips at the very beginning."""
    backend = Backend(models.WordLevel({"▁Paris": 0, "▁is": 1, "▁big": 2, "!": 3, "<unk>": 4}, unk_token="<unk>"))
    backend.normalizer = normalizers.Prepend("▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


@given(st.lists(st.integers(0, 3), max_size=20))
def test_the_space_that_is_stripped_once_stays_elsewhere(ids):
    decode = sentencepiece_like().decode
    assert "".join(pieces(decode, ids)) == decode(ids)


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(st.text("abc", max_size=5), max_size=12), STOPS)
@settings(max_examples=500)
def test_stop_strings_whatever_the_token_borders(chunks, stops):
    expected, stop = naive("".join(chunks), stops)
    stream, told, found = StopStrings(stops), "", None
    for chunk in chunks:
        safe, found = stream.push(chunk)
        told += safe
        assert expected.startswith(told), "something was shown that had to be held back"
        if found is not None:
            break
    else:
        told += stream.flush()
    assert (told, found) == (expected, stop)


@given(st.lists(st.text("abc", max_size=5), max_size=12), STOPS)
def test_no_more_is_held_back_than_could_become_a_stop(chunks, stops):
    stream, told, text = StopStrings(stops), "", ""
    for chunk in chunks:
        safe, found = stream.push(chunk)
        if found is not None:
            return
        told, text = told + safe, text + chunk
        held = text[len(told) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize("stop", ["🙂", "é🙂", "�"])
def test_stop_strings_across_the_bytes_of_a_character(stop):
    stream = TextStream(as_bytes, [stop])
    told, found = "", None
    for byte in ("caf" + stop + " later").encode():
        text, found = stream.push(byte)
        told += text
        if found is not None:
            break
    assert (told, found) == ("caf", stop)


def test_a_stop_string_of_bytes_that_end_unfinished():
    stream = TextStream(as_bytes, ["�"])
    assert [stream.push(0x41), stream.push(0xE2)] == [("A", None), ("", None)]
    assert stream.finish() == ("", "�")
