"""The token file: a corpus tokenised once, read through a memory map ever after.

A folder ``<cache>/<key>`` holds ``ids.bin`` (uint16, or uint32 for a vocabulary above 65,536),
``documents.bin`` (int64 [D, 2] of start and end), ``held_out.bin`` (bool [D]), ``counts.bin`` (uint8, only if
some tokens take no loss) and ``about.json``. The key is a hash of the documents, of the tokenizer and of what
is done with them, so a changed corpus gives another folder. Arrays are bare: NumPy reads the header of its own
format with `ast`, which several threads cannot use at once in Python 3.11 (gh-106905).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lockstep.errors import LockstepError

_FORMAT = 2


@dataclass(frozen=True)
class About:
    """What stands in ``about.json``. bytes: of text in all. held_out_bytes: of the text that evaluation scores."""

    key: str
    dtype: str
    tokens: int
    bytes: int
    held_out_bytes: int
    masked: bool


@dataclass(frozen=True)
class Tokens:
    """A tokenised corpus. ids: [N], mapped. counts: uint8 [N] or None: 0 where a token takes no loss as target.

    documents: int64 [D, 2]; held_out: bool [D].
    """

    about: About
    ids: np.ndarray
    counts: np.ndarray | None
    documents: np.ndarray
    held_out: np.ndarray


@dataclass(frozen=True)
class Encoded:
    """One document's tokens. counts: which of them take loss as targets; None: all.

    bytes: UTF-8 bytes of the document; scored: of the text whose tokens take loss.
    """

    ids: list[int]
    counts: list[int] | None
    bytes: int
    scored: int
    held_out: bool


class KeyHash:
    """The content hash under which a token file is cached."""

    def __init__(self, *settings: str) -> None:
        self._hash = hashlib.sha256()
        for part in (str(_FORMAT), *settings):
            self.add(part)

    def add(self, text: str) -> None:
        """Take in one document. Its length goes in too, so that documents cannot run together."""
        raw = text.encode()
        self._hash.update(len(raw).to_bytes(8, "little"))
        self._hash.update(raw)

    def key(self) -> str:
        return self._hash.hexdigest()[:32]


def open_tokens(cache: Path, key: str) -> Tokens | None:
    """The token file of this key, if it is there whole."""
    folder = cache / key
    try:
        about = About(**json.loads((folder / "about.json").read_text()))
        ids = np.memmap(folder / "ids.bin", dtype=about.dtype, mode="r")
        counts = np.memmap(folder / "counts.bin", dtype=np.uint8, mode="r") if about.masked else None
        documents = np.fromfile(folder / "documents.bin", dtype=np.int64).reshape(-1, 2)
        held_out = np.fromfile(folder / "held_out.bin", dtype=bool)
    except (OSError, ValueError, TypeError):
        return None
    whole = about.key == key and len(ids) == about.tokens and (counts is None or len(counts) == about.tokens)
    whole = whole and len(documents) == len(held_out)
    return Tokens(about, ids, counts, documents, held_out) if whole else None


def write_tokens(
    cache: Path, key: str, vocab_size: int, masked: bool, encoded: Iterable[Encoded], report: Callable[[int], None]
) -> Tokens:
    """Write the token file beside and rename it into place. ``report`` is called with the bytes of text done."""
    dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    beside = cache / f".{key}.{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        about = _write(beside, key, dtype, masked, encoded, report)
        (beside / "about.json").write_text(json.dumps(asdict(about), indent=1))
        shutil.rmtree(cache / key, ignore_errors=True)
        beside.rename(cache / key)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise LockstepError(f"cannot write the token file in {cache}: {error.strerror or error}") from error
    tokens = open_tokens(cache, key)
    assert tokens is not None
    return tokens


def remove_unfinished_data(cache: Path) -> None:
    """Remove what a killed process left behind. Only for the holder of the run's lock."""
    for path in cache.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)


def _write(
    folder: Path, key: str, dtype: np.dtype, masked: bool, encoded: Iterable[Encoded], report: Callable[[int], None]
) -> About:
    spans, held_out = [], []
    position = total = held_bytes = 0
    with (folder / "ids.bin").open("wb") as ids, (folder / "counts.bin").open("wb") as counts:
        for document in encoded:
            ids.write(np.array(document.ids, dtype=dtype).tobytes())
            if masked:
                kept = np.ones(len(document.ids)) if document.counts is None else document.counts
                counts.write(np.array(kept, dtype=np.uint8).tobytes())
            spans.append((position, position + len(document.ids)))
            held_out.append(document.held_out)
            position += len(document.ids)
            total += document.bytes
            held_bytes += document.scored if document.held_out else 0
            report(total)
    np.array(spans, dtype=np.int64).tofile(folder / "documents.bin")
    np.array(held_out, dtype=bool).tofile(folder / "held_out.bin")
    for path in folder.iterdir():
        # Before the rename, or a machine that dies may show a file of the right size without its bytes.
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return About(key, dtype.name, position, total, held_bytes, masked)
