"""Sources, held-out split, tokenizer, token file and its cache."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config import DataConfig
from lockstep.errors import LockstepError
from lockstep.model.tokenizer import Tokenizer, train_bpe
from lockstep.train.data import Document, dataset, documents, open_tokens, scan, tokenised, trained_tokenizer
from lockstep.train.data.encode import encode


def quiet(what: str, done: int, total: int) -> None:
    pass


def read(*sources: Any, **keys: Any) -> list[Document]:
    return list(documents(DataConfig(sources=[str(s) for s in sources], **keys)))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(iter(["def f(x):\n    return x + 1\n" * 20]), 300)


def test_the_standard_library_is_there_and_in_order() -> None:
    found = read("stdlib", max_bytes=2_000_000)
    assert sum(len(d.text.encode()) for d in found) == 2_000_000
    assert found == read("stdlib", max_bytes=2_000_000)
    assert any("import" in d.text for d in found)


def test_folders_are_walked_in_order_and_leave_out_what_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n\n{"text": "four"}\n')
    (tmp_path / "picture.bin").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "zeros.txt").write_bytes(b"a\0b")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_text("no")
    assert [d.text for d in read(tmp_path)] == ["one", "two", "three", "four"]


def test_max_bytes_cuts_between_characters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aé" * 10)
    assert [d.text for d in read(tmp_path, max_bytes=5)] == ["aéa"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ('{"body": "a"}\n', "only body: set data.text_field"),
        ("[1]\n", "record 1 is list"),
        ('{"text": 5}\n', "'text' is 5, expected text"),
        ('{"messages": [{"role": "user"}]}\n', "objects, both text: message 1 has role 'user' and content None"),
        ('{"messages": [{"role": 1, "content": ""}]}\n', "message 1 has role 1"),
        ('{"messages": 5}\n', "must be a list of {role, content}"),
        ('{"messages": []}\n', "must be a list of {role, content}"),
        ('{"text": "\\ud800"}\n', "record 1 holds half a surrogate pair"),
        ("[" * 100_000, "line 1 is no record: it is nested too deeply"),
    ],
)
def test_malformed_records_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(LockstepError, match=message):
        read(tmp_path / "a.jsonl")


def test_a_json_array_is_records(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "one"}, {"text": "two"}]')
    assert [d.text for d in read(tmp_path / "a.json")] == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}', r"holds dict, expected an array of records: put it in \[ \]"),
        ('{"text": "a"}\n{"text": "b"}\n', "is not one JSON array of records .*jsonl"),
        ("[" * 100_000, "is not one JSON array"),
        ('[{"body": "a"}]', "record 1 has neither a text field 'text'"),
    ],
)
def test_a_json_file_that_is_no_array_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(LockstepError, match=message):
        read(tmp_path / "a.json")


def test_parts_of_text_are_joined_as_the_server_does(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    assert read(tmp_path / "a.jsonl")[0].messages == ({"role": "user", "content": "one two"},)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}', encoding="utf-8-sig")
    assert [d.text for d in read(tmp_path)] == ["one", "two"]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="'/no/such/file' does not exist"):
        read("/no/such/file")
    with pytest.raises(LockstepError, match="'' is no file or folder"):
        read("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(LockstepError, match=r"latin.txt is not UTF-8 text \(byte 3\)"):
        read(tmp_path / "latin.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LockstepError, match="the corpus is empty"):
        scan(DataConfig(sources=[str(tmp_path / "empty")]), quiet)


def test_a_dataset_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(LockstepError, match="pip install datasets"):
        read("hf:some/dataset")


def test_a_damaged_tokenizer_in_the_cache_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text to learn from\n" * 20)
    corpus = scan(DataConfig(sources=[str(tmp_path / "a.txt")]), quiet)
    first = trained_tokenizer(corpus, 300, tmp_path / "cache", quiet)
    next((tmp_path / "cache").glob("tokenizer-*/tokenizer.json")).unlink()
    assert trained_tokenizer(corpus, 300, tmp_path / "cache", quiet).backend.to_str() == first.backend.to_str()


def test_the_split_is_by_content(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i:03}.txt").write_text(f"document {i % 150}")
    split = list(scan(DataConfig(sources=[str(tmp_path)], held_out=0.2), quiet).split())
    held, kept = ({d.text for d, h in split if h is side} for side in (True, False))
    assert not held & kept  # copies are on the same side
    assert 15 < len(held) < 50  # 30 expected; four standard deviations are 20


def test_a_single_text_is_cut_at_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(100)))
    (kept, no), (held, yes) = scan(DataConfig(sources=[str(tmp_path)], held_out=0.1), quiet).split()
    assert (no, yes) == (False, True)
    assert kept.text.endswith("\n")
    assert held.text.startswith("line 9")
    assert kept.text + held.text == (tmp_path / "a.txt").read_text()


def test_a_single_line_is_cut_between_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 100)
    (kept, _), (held, _) = scan(DataConfig(sources=[str(tmp_path)], held_out=0.1), quiet).split()
    assert kept.text + held.text == "word " * 100
    assert held.text.startswith("word")


def test_nothing_is_held_out_when_not_asked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n" * 100)
    assert [h for _, h in scan(DataConfig(sources=[str(tmp_path)], held_out=0.0), quiet).split()] == [False]


def test_text_is_enclosed_and_decodes_back(tokenizer: Tokenizer) -> None:
    text = "def g(y): return 'ünïcode' * y\n"
    (found,) = encode([(Document(text=text), False)], tokenizer, False)
    assert found.ids[-1] == min(tokenizer.eos_ids)
    assert tokenizer.decode(found.ids) == text
    assert found.bytes == len(text.encode())


def test_only_the_assistant_counts(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "one?"}, {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two?"}, {"role": "assistant", "content": "second"},
    ]  # fmt: skip
    (found,) = encode([(Document(messages=tuple(messages)), False)], tokenizer, True)
    assert found.counts is not None
    counted = tokenizer.decode([t for t, c in zip(found.ids, found.counts, strict=True) if c], skip_special=False)
    assert counted == "first<|im_end|>\nsecond<|im_end|>\n"


def test_a_template_that_looks_ahead_is_refused(tokenizer: Tokenizer) -> None:
    template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    looks_ahead = Tokenizer(tokenizer.backend, template)
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    with pytest.raises(LockstepError, match="assistant_only"):
        list(encode([(Document(messages=messages), False)], looks_ahead, True))


def test_token_file_is_cached_by_content(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source, cache = tmp_path / "text", tmp_path / "cache"
    source.mkdir()
    for i in range(20):
        (source / f"{i}.txt").write_text(f"number {i}\n" * 10)
    config = DataConfig(sources=[str(source)], held_out=0.2)
    first = tokenised(scan(config, quiet), tokenizer, cache, quiet)
    stamp = (cache / first.about.key / "ids.bin").stat().st_mtime_ns
    again = tokenised(scan(config, quiet), tokenizer, cache, quiet)
    assert again.about == first.about
    assert (cache / first.about.key / "ids.bin").stat().st_mtime_ns == stamp
    (source / "3.txt").write_text("changed")
    assert tokenised(scan(config, quiet), tokenizer, cache, quiet).about.key != first.about.key


def test_a_damaged_token_file_is_made_again(tmp_path: Path, tokenizer: Tokenizer, text: Path) -> None:
    corpus = scan(DataConfig(sources=[str(text)]), quiet)
    first = tokenised(corpus, tokenizer, tmp_path, quiet)
    ids = np.array(first.ids)
    with (tmp_path / first.about.key / "ids.bin").open("r+b") as file:
        file.truncate(100)
    assert open_tokens(tmp_path, first.about.key) is None
    assert np.array_equal(tokenised(corpus, tokenizer, tmp_path, quiet).ids, ids)


def test_the_trained_tokenizer_is_cached_and_the_same(tmp_path: Path, text: Path) -> None:
    corpus = scan(DataConfig(sources=[str(text)]), quiet)
    one = trained_tokenizer(corpus, 300, tmp_path / "a", quiet)
    two = trained_tokenizer(corpus, 300, tmp_path / "b", quiet)
    cached = trained_tokenizer(corpus, 300, tmp_path / "a", quiet)
    assert one.backend.to_str() == two.backend.to_str() == cached.backend.to_str()
    assert one.vocab_size == 300


def test_bytes_per_token(tmp_path: Path, tokenizer: Tokenizer, text: Path) -> None:
    tokens = tokenised(scan(DataConfig(sources=[str(text)], held_out=0.2), quiet), tokenizer, tmp_path, quiet)
    data = dataset(tokens, 32, 0)
    predicted = sum(b.loss_tokens for b in data.held_out_batches(10**6, 4))
    held = tokens.documents[tokens.held_out].tolist()
    size = len(tokenizer.decode(tokens.ids[held[0][0] : held[0][1]].tolist()).encode())
    assert data.bytes_per_token == pytest.approx(size / predicted)


def test_bytes_per_token_of_answers_counts_answers_only(tmp_path: Path, tokenizer: Tokenizer) -> None:
    talks = [
        [{"role": "user", "content": f"question {i} " * 9}, {"role": "assistant", "content": "yes"}] for i in range(9)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    config = DataConfig(sources=[str(tmp_path / "a.jsonl")], held_out=0.4, assistant_only=True)
    tokens = tokenised(scan(config, quiet), tokenizer, tmp_path / "c", quiet)
    answer = "yes<|im_end|>\n"
    assert tokens.about.held_out_bytes == int(tokens.held_out.sum()) * len(answer) > 0
    assert dataset(tokens, 128, 0).bytes_per_token == len(answer) / len(tokenizer.encode(answer))


def test_a_dataset_of_the_library_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for the library: what it is asked for, and that its rows are taken."""
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> list[dict[str, str]]:
        asked.append((name, split))
        return [{"body": "one"}, {"body": "two"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert [d.text for d in read("hf:some/name:test", text_field="body")] == ["one", "two"]
    read("hf:some/name", text_field="body")
    assert asked == [("some/name", "test"), ("some/name", "train")]


def test_a_corpus_smaller_than_a_sequence_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("short")
    tokens = tokenised(scan(DataConfig(sources=[str(tmp_path / "a.txt")]), quiet), tokenizer, tmp_path / "c", quiet)
    with pytest.raises(LockstepError, match=r"less than one sequence of data\.seq_len 64"):
        dataset(tokens, 64, 0)


def test_jsonl_with_chat_and_text(tmp_path: Path) -> None:
    rows = [{"text": "plain"}, {"messages": [{"role": "user", "content": "hi"}]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    plain, chat = read(tmp_path / "a.jsonl")
    assert plain.text == "plain"
    assert chat.messages == ({"role": "user", "content": "hi"},)
