"""Long structures are compiled in another process first: a library that computes cannot be interrupted, a process can.

What takes too long there is refused, and nobody else waits for it; what does not is compiled here after it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import msgspec
from tokenizers import Tokenizer as Backend

from lockstep.errors import LockstepError
from lockstep.model.tokenizer import Tokenizer
from lockstep.serve.launch import Launched, begin, launch_trial
from lockstep.serve.structured import Guides, StructuredOutputs
from lockstep.serve.wire import Message, frame, receive_frame

_START = 60.0
"""Seconds that the process may take until it is ready: it imports, and reads the vocabulary."""
_NICENESS = 10
"""Who decodes goes first."""


class Words(Message, frozen=True):
    """The vocabulary: tokenizer.json, the embedding's size, the tokens that end a text."""

    tokenizer: str
    size: int
    eos: list[int]


class Told(Message, frozen=True):
    """What is wrong with the structure; None: nothing."""

    wrong: str | None


_words: msgspec.msgpack.Decoder[Words] = msgspec.msgpack.Decoder(Words)
_structure: msgspec.msgpack.Decoder[StructuredOutputs] = msgspec.msgpack.Decoder(StructuredOutputs)
_told: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)


class Trial:
    """One structure at a time, by one thread. The process is started at the first, and again after one took too long;
    it ends with this process."""

    def __init__(self, words: Callable[[], Words], seconds: float) -> None:
        """words: gives the vocabulary, when it is needed. seconds: that a structure may take."""
        self._words, self._seconds = words, seconds
        self._process: Launched | None = None

    def check(self, structure: StructuredOutputs) -> None:
        """LockstepError for one that is wrong, or takes too long."""
        try:
            link = self._ready()
            link.settimeout(self._seconds)
            wrong = self._ask(link, _frame(structure))
        except TimeoutError:
            self.close()
            raise LockstepError(
                f"the {structure.title} takes longer than {self._seconds:g} seconds to compile: make it smaller "
                "(what it costs most are the optional properties of one object), or start the server with a larger "
                "structure_seconds."
            ) from None
        if wrong is not None:
            raise LockstepError(wrong)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _ready(self) -> socket.socket:
        if self._process is None:
            self._process = launch_trial()
            self._process.link.settimeout(_START)
            self._ask(self._process.link, frame(self._words()))
        return self._process.link

    def _ask(self, link: socket.socket, said: bytes) -> str | None:
        try:
            link.sendall(said)
            body = receive_frame(link)
        except ConnectionError:
            body = None
        if body is None:  # its memory ran out, say
            self.close()
            return "the structure could not be compiled, its compiler ended: make it smaller."
        return _told.decode(body).wrong


def _frame(structure: StructuredOutputs) -> bytes:
    """A structure as it goes to the process."""
    body = msgspec.msgpack.encode(structure)
    return len(body).to_bytes(4, "little") + body


def main() -> None:
    """The process."""
    link = begin()
    os.nice(_NICENESS)
    body = receive_frame(link)
    if body is None:
        return
    words = _words.decode(body)
    backend = Backend.from_str(words.tokenizer)
    guides = Guides(Tokenizer(backend), words.size, frozenset(words.eos))
    guides.check(StructuredOutputs(choice=("a",)))  # the vocabulary is read
    link.sendall(frame(Told(None)))
    while (body := receive_frame(link)) is not None:
        try:
            guides.check(_structure.decode(body))
            link.sendall(frame(Told(None)))
        except LockstepError as error:
            link.sendall(frame(Told(str(error))))


if __name__ == "__main__":
    main()
