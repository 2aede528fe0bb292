"""Where documents come from: the standard library's source, text files, folders, JSONL, Hugging Face datasets.

Documents come in a fixed order (sorted paths), so that one corpus always gives one token file.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.train import DataConfig
from lockstep.errors import LockstepError

STDLIB = "stdlib"
_HF = "hf:"
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
_TEST_FOLDERS = {"test", "tests", "idle_test"}


@dataclass(frozen=True)
class Document:
    """One document: text, or the messages of a chat."""

    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()

    @property
    def plain(self) -> str:
        """The text, for hashing, counting bytes and training a tokenizer."""
        return self.text if not self.messages else json.dumps(self.messages, ensure_ascii=False, sort_keys=True)


def documents(config: DataConfig) -> Iterator[Document]:
    """All documents of the sources that are not empty, in order, up to ``max_bytes`` of text.

    Raises `LockstepError` for a path that does not exist and for a malformed record.
    """
    left = config.max_bytes
    for source in config.sources:
        for document in _source(source, config):
            size = len(document.plain.encode())
            if size == 0:
                continue
            if left is not None and size > left:
                yield from _shortened(document, left)
                return
            left = None if left is None else left - size
            yield document


def _shortened(document: Document, size: int) -> Iterator[Document]:
    """The first bytes of a text, whole characters only; a chat is not cut."""
    text = document.text.encode()[:size].decode(errors="ignore")
    if text:
        yield Document(text=text)


def _source(source: str, config: DataConfig) -> Iterator[Document]:
    if source == STDLIB:
        return _stdlib()
    if source.startswith(_HF):
        return _records(_dataset(source), source, config)
    path = Path(source).expanduser()
    if path.is_dir() and source:
        return _folder(path, config)
    if path.is_file():
        return _file(path, config, required=True)
    wrong = "is no file or folder" if path.exists() else "does not exist"
    raise LockstepError(
        f"data.sources: {source!r} {wrong}: give a text file, a folder, a .jsonl file, `hf:NAME` or `{STDLIB}`"
    )


def _stdlib() -> Iterator[Document]:
    """The standard library's modules without its tests, by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _files(root, _SKIPPED_FOLDERS | _TEST_FOLDERS):
        if path.suffix == ".py":
            yield from _text(path, required=False)


def _folder(root: Path, config: DataConfig) -> Iterator[Document]:
    """Every text and JSONL file below a folder, by path; hidden and binary files are left out."""
    for path in _files(root, _SKIPPED_FOLDERS):
        yield from _file(path, config, required=False)


def _files(root: Path, skipped: set[str]) -> Iterator[Path]:
    """Files below root in the order of their path's parts, the same on every file system."""
    for path in sorted(root.iterdir(), key=lambda p: p.name):
        if path.name.startswith(".") or path.name in skipped:
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _files(path, skipped)
        elif path.is_file():
            yield path


def _file(path: Path, config: DataConfig, required: bool) -> Iterator[Document]:
    if path.suffix in (".jsonl", ".ndjson"):
        return _records(_json_lines(path), str(path), config)
    if path.suffix == ".json" and required:  # in a folder it may be anything; named, it is meant as records
        return _records(_json_array(path), str(path), config)
    return _text(path, required)


def _text(path: Path, required: bool) -> Iterator[Document]:
    """The file as one document. Not UTF-8 text: an error if the user named this file, else left out."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if required:
            raise LockstepError(f"{path} is not UTF-8 text (byte {error.start}): convert it to UTF-8 first") from error
        return
    except OSError as error:
        raise LockstepError(f"cannot read {path}: {error.strerror or error}") from error
    if "\0" not in text or required:
        yield Document(text=text)


def _json_lines(path: Path) -> Iterator[Any]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _json(line, path, number)
    except UnicodeDecodeError as error:
        raise LockstepError(f"{path} is not UTF-8 text: convert it to UTF-8 first") from error
    except OSError as error:
        raise LockstepError(f"cannot read {path}: {error.strerror or error}") from error


def _json_array(path: Path) -> list[Any]:
    """The records of a file that is one JSON array."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise LockstepError(f"{path} is not UTF-8 text: convert it to UTF-8 first") from error
    except OSError as error:
        raise LockstepError(f"cannot read {path}: {error.strerror or error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise LockstepError(
            f"{path} is not one JSON array of records ({error}): write one, or name a file of records by line .jsonl"
        ) from error
    if not isinstance(found, list):
        raise LockstepError(
            f"{path} holds {type(found).__name__}, expected an array of records: put it in [ ], or one record per line "
            "in a .jsonl file"
        )
    return found


def _json(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise LockstepError(f"{path} line {number} is not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise LockstepError(f"{path} line {number} is no record: it is nested too deeply") from error


def _records(rows: Iterable[Any], source: str, config: DataConfig) -> Iterator[Document]:
    for number, row in enumerate(rows, 1):
        yield _record(row, f"{source} record {number}", config)


def _record(row: Any, where: str, config: DataConfig) -> Document:
    if not isinstance(row, dict):
        raise LockstepError(f"{where} is {type(row).__name__}, expected an object with {config.text_field!r}")
    messages, text = row.get(config.messages_field), row.get(config.text_field)
    if messages is not None:
        found = Document(messages=tuple(_messages(messages, f"{where}: {config.messages_field!r}")))
    elif isinstance(text, str):
        found = Document(text=text)
    elif config.text_field in row:
        raise LockstepError(f"{where}: {config.text_field!r} is {text!r:.60}, expected text")
    else:
        raise LockstepError(
            f"{where} has neither a text field {config.text_field!r} nor {config.messages_field!r}, only "
            f"{', '.join(sorted(row)) or 'nothing'}: set data.text_field or data.messages_field"
        )
    try:
        found.plain.encode()
    except UnicodeEncodeError as error:
        raise LockstepError(f"{where} holds half a surrogate pair ({error.object[error.start]!r}), no text") from error
    return found


def _messages(found: Any, where: str) -> Iterator[dict[str, Any]]:
    """Messages as the server takes them: the content is text, or parts of text, which are joined."""
    if not isinstance(found, list) or not found or not all(isinstance(m, dict) for m in found):
        raise LockstepError(f"{where} must be a list of {{role, content}} objects")
    for number, message in enumerate(found, 1):
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(role, str) or not isinstance(content, str):
            raise LockstepError(
                f"{where} must be a list of {{role, content}} objects, both text: message {number} has "
                f"role {role!r:.40} and content {content!r:.60}"
            )
        yield {**message, "content": content}


def _dataset(source: str) -> Iterable[Any]:
    """`hf:NAME[:SPLIT]`: a dataset of the hub or one saved on disk, through the `datasets` library."""
    name, _, split = source[len(_HF) :].partition(":")
    try:
        import datasets
    except ImportError as error:
        raise LockstepError(f"data.sources: {source!r} needs the library `datasets`: pip install datasets") from error
    try:
        if Path(name).expanduser().is_dir() and (Path(name).expanduser() / "dataset_info.json").exists():
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # the library raises many kinds, all of them about what the user named
        raise LockstepError(f"data.sources: {source!r} cannot be loaded: {error}") from error
