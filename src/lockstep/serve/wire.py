"""What the server and the engine's process say to each other: typed messages in MessagePack, each behind its length.

Nothing is pickled: what comes in is checked against its type, and cannot name code. A float keeps its bits.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Literal

import msgspec

from lockstep.serve.params import Embedding, Output, SamplingParams
from lockstep.serve.state import Stats

_LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, frozen=True, tag=True):
    """`identity` is of the server's choosing; what answers a message carries the same one."""


class EngineSpec(Message, frozen=True):
    """Which engine: what `lockstep.load` and `Engine` take, whose defaults are not repeated here (see `spec.py`)."""

    model: str
    dtype: Literal["bfloat16", "float32"]
    numerics: Literal["bitwise", "fast"]
    kv_memory: int
    kv_dtype: Literal["auto", "int8"]
    max_batch_tokens: int
    step_seconds: float | None
    level: Literal["O0", "O2"]
    max_running: int
    max_queue: int | None
    prefix_cache: bool
    drafts: int | None
    draft_model: str | None
    shares: dict[str, float]
    """Of clients that get more, or less, than 1."""
    tp: int
    weight_cache: int
    """Bytes of the disk for packed weights."""
    structure_seconds: float
    """How long a long structure may take to compile."""
    log_level: str
    """debug: the engine checks its page accounts after every step."""
    weights: str | None = None
    """A directory whose weights replace the model's."""


class Submit(Message, frozen=True):
    identity: int
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    timeout: float | None = None
    salt: str | None = None
    client: str = ""
    embedding: Embedding | None = None


class Abort(Message, frozen=True):
    identity: int


class Weights(Message, frozen=True):
    identity: int
    path: str


class Ping(Message, frozen=True):
    """Asks for a Pong, which comes between two steps: whether the engine still works."""


Command = EngineSpec | Submit | Abort | Weights | Ping


class Vocabulary(Message, frozen=True):
    """The model's tokenizer, for the server, which reads no model files: before the engine is ready, so that both have
    something to do."""

    tokenizer: str
    """tokenizer.json"""
    template: str | None
    special: tuple[int | None, list[int], int | None]
    """bos id, eos ids, pad id"""
    settings: dict[str, Any]
    size: int
    """Of the model's embedding."""


class Ready(Message, frozen=True):
    """The engine is loaded, its vocabulary was told."""

    max_length: int
    stats: Stats


class Accepted(Message, frozen=True):
    identity: int


class Refused(Message, frozen=True):
    identity: int
    kind: Literal["mistake", "too long", "queue full", "failed"]
    reason: str


class Replaced(Message, frozen=True):
    identity: int
    parameters: int


class Told(Message, frozen=True):
    """What a step gave, with the requests it belongs to."""

    outputs: list[tuple[int, Output]]
    stats: Stats


class Pong(Message, frozen=True):
    """The engine works."""


class Failed(Message, frozen=True):
    """The engine cannot start, or cannot go on. mistake: the reason is for the user; otherwise it is a bug."""

    reason: str
    mistake: bool = False


Report = Vocabulary | Ready | Accepted | Refused | Replaced | Told | Pong | Failed

_encode = msgspec.msgpack.Encoder().encode
_command: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_report: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def frame(message: Message) -> bytes:
    """The message as it goes over the socket."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


def receive(link: socket.socket) -> Command | None:
    """The next command; None when the server is gone."""
    body = receive_frame(link)
    return None if body is None else _command.decode(body)


def receive_frame(link: socket.socket) -> bytes | None:
    """The body of the next message; None when the other side is gone."""
    head = _exactly(link, _LENGTH.size)
    return None if head is None else _exactly(link, _LENGTH.unpack(head)[0])


async def read(stream: asyncio.StreamReader) -> Report:
    """The next report; IncompleteReadError when the engine's process is gone."""
    (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    return _report.decode(await stream.readexactly(length))


def _exactly(link: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        try:
            part = link.recv(min(count, 2**20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
