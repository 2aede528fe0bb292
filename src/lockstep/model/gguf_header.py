"""The header of a GGUF file: metadata and where each tensor lies. The `gguf` package's reader builds an array per
string, which takes seconds for a vocabulary; this reads the same layout (GGUF versions 2 and 3) in one pass."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """shape: rows first (GGUF's own order reversed). kind: ggml's number of the type. offset: bytes into the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """metadata: GGUF's keys. tensors: by name. data: the mapped file, private: writing never reaches it."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: mmap.mmap


def read_header(file: Path) -> Header:
    """LockstepError for a file that is no GGUF or ends within its header."""
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise LockstepError(f"{file} is no GGUF file: it does not start with the letters GGUF. {_instead(file)}")
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        return _parse(_Cursor(data, 4), data, file)
    except (struct.error, UnicodeDecodeError, KeyError, IndexError) as error:
        raise LockstepError(f"{file} is damaged or incomplete: its header cannot be read ({error!r})") from error


def _instead(file: Path) -> str:
    """What to give as a model in place of a file that is none."""
    if file.suffix in (".yaml", ".yml", ".toml"):
        return "A configuration says how to train a model and is none: give the folder that `lockstep export` writes."
    if file.suffix == ".safetensors" or file.name == "config.json":
        return f"Give the folder it lies in: {file.parent}"
    return "Give a .gguf file, or the folder of a Hugging Face model."


def _parse(cursor: _Cursor, data: mmap.mmap, file: Path) -> Header:
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise LockstepError(f"{file} has GGUF version {version}; versions 2 and 3 (little-endian) can be read")
    count, keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(keys):
        name = cursor.string()
        metadata[name] = cursor.value(cursor.scalar("I"))
    infos = [(cursor.string(), *_tensor(cursor)) for _ in range(count)]
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-cursor.offset // alignment) * alignment
    tensors = {name: TensorInfo(shape, kind, start + offset) for name, shape, kind, offset in infos}
    return Header(metadata, tensors, data)


def _tensor(cursor: _Cursor) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))
    return shape[::-1], cursor.scalar("I"), cursor.scalar("Q")


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap, offset: int):
        self.data, self.offset = data, offset

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.offset)
        self.offset += struct.calcsize(code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        text = self.data[self.offset : self.offset + length]
        if len(text) != length:
            raise IndexError("the file ends within a string")
        self.offset += length
        return text.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        element, length = self.scalar("I"), self.scalar("Q")
        if element == _STRING:
            return self._strings(length)
        if element == _ARRAY:
            return [self.value(element) for _ in range(length)]
        values = struct.unpack_from(f"<{length}{_SCALARS[element]}", self.data, self.offset)
        self.offset += length * struct.calcsize(_SCALARS[element])
        return list(values)

    def _strings(self, count: int) -> list[str]:
        """A vocabulary: the one place where the time of a call per value shows."""
        data, offset, unpack = self.data, self.offset, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            end = offset + 8 + unpack(data, offset)[0]
            found.append(data[offset + 8 : end].decode("utf-8"))
            offset = end
        if offset > len(data):
            raise IndexError("the file ends within a list of strings")
        self.offset = offset
        return found
