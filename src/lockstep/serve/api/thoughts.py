"""Thoughts apart from answers: what a reasoning model writes between <think> and </think> before it says something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from lockstep.model.tokenizer import Tokenizer
from lockstep.serve.structured import StructuredOutputs
from lockstep.serve.text import begun

OPEN, CLOSE = "<think>", "</think>"
Expects = Literal["none", "may", "begun"]
"""What a completion begins with: no thought, a thought or none, the rest of a thought that the prompt opens."""


def expects(tokenizer: Tokenizer, prompt: Sequence[int]) -> Expects:
    """What a completion of a chat's prompt begins with. Models that think (Qwen 3, DeepSeek-R1, SmolLM 3) have a
    template that knows the marks."""
    if CLOSE not in (tokenizer.template or ""):
        return "none"
    end = tokenizer.decode(prompt[-16:], skip_special=False).rstrip()
    return "begun" if end.endswith(OPEN) else "none" if end.endswith(CLOSE) else "may"


def behind_thoughts(
    structure: StructuredOutputs | None, tokenizer: Tokenizer, expected: Expects
) -> tuple[StructuredOutputs | None, Expects]:
    """The structure for what comes behind a thought, where the marks are tokens; else there is no thought before it."""
    if structure is None or expected == "none":
        return structure, expected
    opens, closes = (tokenizer.backend.token_to_id(mark) for mark in (OPEN, CLOSE))
    if closes is None or opens is None:
        return structure, "none"
    return replace(structure, opens=None if expected == "begun" else opens, closes=closes), expected


class Thoughts:
    """Splits one choice's text as it grows. White space around the marks belongs to neither side."""

    def __init__(self, expected: Expects) -> None:
        self._state = {"none": "answer", "may": "begin", "begun": "thought"}[expected]
        self._held = ""
        self._fresh = expected != "none"
        """Nothing but white space has come on this side of the mark."""
        self._seen = 0
        self._end: int | None = None
        """Characters of the text up to the end of the closing mark."""

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """(what it adds to the thought, what it adds to the answer). last: nothing follows."""
        self._seen += len(text)
        self._held += text
        if self._state == "begin":
            self._begin(last)
        thought = self._think(last) if self._state == "thought" else ""
        return thought, self._answer(last) if self._state == "answer" else ""

    def tokens(self, offsets: Sequence[int]) -> int:
        """How many of the tokens that begin at these places of the text are thought, its marks included."""
        end = self._seen + 1 if self._state == "thought" else self._end or 0
        return sum(offset < end for offset in offsets)

    def _begin(self, last: bool) -> None:
        """Thoughts come first, or there are none."""
        begin = self._held.lstrip()
        if begin.startswith(OPEN):
            self._state, self._held = "thought", begin[len(OPEN) :]
        elif last or not OPEN.startswith(begin):
            self._state, self._fresh = "answer", False

    def _think(self, last: bool) -> str:
        at = self._held.find(CLOSE)
        if at >= 0:
            inside, self._held = self._held[:at].rstrip(), self._held[at + len(CLOSE) :]
            self._end = self._seen - len(self._held)
        else:
            # An end that may become the mark, and white space that may stand before it, wait.
            kept = self._held[: len(self._held) - begun(self._held, CLOSE)].rstrip()
            inside = self._held if last else kept
            self._held = self._held[len(inside) :]
        if self._fresh:
            inside = inside.lstrip()
        self._fresh = self._fresh and not inside
        if at >= 0:
            self._state, self._fresh = "answer", True
        return inside

    def _answer(self, last: bool) -> str:
        said, self._held = self._held, ""
        if self._fresh:
            said = said.lstrip()
            self._fresh = not said
        return said
