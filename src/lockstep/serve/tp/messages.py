"""How the first rank sets another one up, over the socket between the two: typed messages, as in `serve/wire.py`."""

from __future__ import annotations

import socket
from typing import Any, Literal, TypeVar

import msgspec

from lockstep.serve.wire import Message, receive_frame

T = TypeVar("T")


class Join(Message, frozen=True):
    """Which rank of how many it is, the file where they meet, and which model it gets its slices of.

    model: what `lockstep.load` takes; None: of this configuration, and the first rank sends the weights. dtypes: what
    they are kept in, by name.
    """

    rank: int
    tp: int
    meeting: str
    model: str | None
    config: dict[str, Any] | None
    dtypes: dict[str, str]
    dtype: str
    numerics: Literal["bitwise", "fast"]
    packed: tuple[str, int, int] | None = None
    """Of the cache of packed weights: directory, limit, small."""


class Done(Message, frozen=True):
    """It is ready for what comes next: to meet the others, to be given pages, to be told of passes."""


class CannotJoin(Message, frozen=True):
    """mistake: the reason is for the user."""

    reason: str
    mistake: bool


class Pages(Message, frozen=True):
    """Pages of keys and values to hold, and how passes run over them: what `Runner` takes."""

    count: int
    dtype: str
    rows: int
    level: Literal["O0", "O2"]


Answer = Done | CannotJoin

orders: msgspec.msgpack.Decoder[Join | Pages] = msgspec.msgpack.Decoder(Join | Pages)
answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def hear(link: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """The next message; None when the other side is gone."""
    body = receive_frame(link)
    return None if body is None else decoder.decode(body)
