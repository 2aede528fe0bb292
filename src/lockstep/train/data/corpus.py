"""From sources to a token file: hash the corpus, split off held-out documents, train or take a tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.train import DataConfig
from lockstep.errors import LockstepError
from lockstep.model.tokenizer import Tokenizer, train_bpe
from lockstep.train.data.encode import encode
from lockstep.train.data.sources import Document, documents
from lockstep.train.data.tokens import KeyHash, Tokens, open_tokens, write_tokens

Report = Callable[[str, int, int], None]
"""(what is done, bytes of text done, bytes of text in all)"""


_TOKENIZER_BYTES = 64 * 2**20
"""Text that a tokenizer is trained on, at most; the merges hardly change beyond."""


@dataclass(frozen=True)
class Corpus:
    """What was found in the sources. smallest: the least content hash; that document is held out in any case."""

    config: DataConfig
    key: str
    count: int
    bytes: int
    smallest: int

    def split(self) -> Iterator[tuple[Document, bool]]:
        """Every document with its held-out flag; a single document is cut in two, near its end.

        The flag is a function of the content, so a document is on the same side in every corpus, and copies of
        one document are never on both.
        """
        fraction = self.config.held_out
        for document in documents(self.config):
            if self.count == 1 and fraction > 0 and not document.messages:
                yield from _cut(document.text, fraction)
            elif self.count == 1 or fraction == 0:
                yield document, False
            else:
                place = _place(document.plain)
                yield document, place < fraction * 2**64 or place == self.smallest


def scan(config: DataConfig, report: Report) -> Corpus:
    """Read the sources once. Raises `LockstepError` for missing paths and for an empty corpus."""
    content, count, size, smallest = KeyHash(), 0, 0, 2**64
    for document in documents(config):
        content.add(document.plain)
        count += 1
        size += len(document.plain.encode())
        smallest = min(smallest, _place(document.plain))
        report("reading the corpus", size, 0)
    if count == 0:
        limit = "" if config.max_bytes is None else f" within data.max_bytes {config.max_bytes}"
        raise LockstepError(f"data.sources: no text in {', '.join(config.sources)}{limit}: the corpus is empty")
    return Corpus(config, content.key(), count, size, smallest)


def trained_tokenizer(corpus: Corpus, vocab_size: int, cache: Path, report: Report) -> Tokenizer:
    """A BPE tokenizer of the training documents, made once and kept in the cache by content."""
    name = KeyHash(corpus.key, str(corpus.config.held_out), "bpe", str(vocab_size)).key()
    folder = cache / f"tokenizer-{name}"
    if not (folder / "tokenizer.json").is_file():
        tokenizer = train_bpe(_training_texts(corpus, report), vocab_size)
        beside = cache / f".tokenizer-{os.getpid()}"
        shutil.rmtree(beside, ignore_errors=True)
        try:
            beside.mkdir(parents=True)
            tokenizer.save(beside)
            shutil.rmtree(folder, ignore_errors=True)
            beside.rename(folder)
        except OSError as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise LockstepError(f"cannot write the tokenizer in {cache}: {error.strerror or error}") from error
    # Read back even when just made, so that a first and a later run hold the same object.
    return Tokenizer.from_dir(folder)


def tokenised(corpus: Corpus, tokenizer: Tokenizer, cache: Path, report: Report) -> Tokens:
    """The corpus' token file, made now or taken from the cache."""
    config = corpus.config
    settings = (str(config.held_out), str(config.assistant_only))
    key = KeyHash(corpus.key, tokenizer_key(tokenizer), *settings).key()
    found = open_tokens(cache, key)
    if found is not None:
        return found
    encoded = encode(corpus.split(), tokenizer, config.assistant_only)
    tokens = write_tokens(
        cache, key, tokenizer.vocab_size, config.assistant_only, encoded,
        lambda done: report("tokenising", done, corpus.bytes),
    )  # fmt: skip
    report("tokenising", corpus.bytes, corpus.bytes)
    return tokens


def tokenizer_key(tokenizer: Tokenizer) -> str:
    """A hash of everything in a tokenizer that decides which ids a text gives."""
    parts = [tokenizer.backend.to_str(), tokenizer.template, tokenizer.bos_id, sorted(tokenizer.eos_ids)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _training_texts(corpus: Corpus, report: Report) -> Iterator[str]:
    done = 0
    for document, held_out in corpus.split():
        if done > _TOKENIZER_BYTES:
            return
        done += len(document.plain.encode())
        report("training the tokenizer", done, corpus.bytes)
        if not held_out:
            yield document.text or "\n".join(str(m["content"]) for m in document.messages)


def _place(text: str) -> int:
    """Where a document falls in 0 .. 2**64, by its content."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _cut(text: str, fraction: float) -> Iterator[tuple[Document, bool]]:
    """The text and its last fraction, cut behind the end of a line, or of a word where there are no lines."""
    kept = int(len(text) * (1.0 - fraction))
    at = next((at for mark in "\n " if 0 < (at := text.find(mark, kept) + 1) < len(text)), 0)
    if at:
        yield Document(text=text[:at]), False
        yield Document(text=text[at:]), True
    else:
        yield Document(text=text), False
