"""Tokens to text as they come: whole UTF-8 characters only, and nothing that may become a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
_BROKEN = "\ufffd"
_LONG = 24
"""Tokens without a character's end after which the window is cut: no real character is that long."""


class Detokenizer:
    """Decodes a growing list of tokens. What `push` and `flush` gave, joined, is the decoding of the whole list.

    A tokenizer may treat the first token specially (a stripped space), and a character may be spread over tokens.
    So a window of tokens is decoded each time: it starts at a place that is known to begin a character, and its
    text counts once it ends in a whole one.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._told = 0
        """Tokens at the window's start whose text was given out."""
        self._prefix = ""
        """The text of those."""

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_BROKEN):
            return self._cut(text) if len(self._window) - self._told > _LONG else ""
        return self._give(text, len(self._window))

    def flush(self) -> str:
        """What is left, with U+FFFD for bytes that never became a character."""
        text = self._decode(self._window)[len(self._prefix) :]
        self._window, self._told, self._prefix = [], 0, ""
        return text

    def _give(self, text: str, told: int) -> str:
        new = text[len(self._prefix) :]
        if not new and len(self._window) > _LONG:
            self._window.pop()  # a special token without text, one of many
            return ""
        if new:
            # The tokens told before have done their work as context; the ones told now take their place.
            self._window = self._window[self._told :]
            told -= self._told
        self._told, self._prefix = told, self._decode(self._window[:told])
        return new

    def _cut(self, text: str) -> str:
        """Bytes that are no UTF-8 have piled up: find a place where decoding apart changes nothing."""
        for at in range(len(self._window) - 4, self._told, -1):
            head = self._decode(self._window[:at])
            if head + self._decode(self._window[at:]) == text:
                return self._give(head, at)
        return ""


class StopStrings:
    """Holds back text that may be the beginning of a stop string, and finds the first one that comes."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string that ended it or None)."""
        if not self._stops:
            return text, None
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            # The one that ends first, as if the text had come character by character.
            _, at, stop = min(found)
            safe, self._held = self._held[:at], ""
            return safe, stop
        keep = begun(self._held, *self._stops)
        safe = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return safe, None

    def flush(self) -> str:
        """Generation ended otherwise: what was held back is text after all."""
        text, self._held = self._held, ""
        return text


def begun(text: str, *marks: str) -> int:
    """The length of the longest end of a text with which one of these may begin, as the text goes on."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


class TextStream:
    """Detokenizer and stop strings of one choice."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self.length = 0
        """Characters decoded so far, held-back ones included: where the next token's text begins."""

    def push(self, token: int) -> tuple[str, str | None]:
        text = self._detokenizer.push(token)
        self.length += len(text)
        return self._stops.push(text)

    def finish(self) -> tuple[str, str | None]:
        """The rest; an unfinished character at the very end may still complete a stop string."""
        safe, stop = self._stops.push(self._detokenizer.flush())
        return (safe, stop) if stop else (safe + self._stops.flush(), None)
