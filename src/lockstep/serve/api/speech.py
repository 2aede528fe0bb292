"""What one choice of a chat says, as it grows: its thoughts, its text, and the calls in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.serve.api import tools
from lockstep.serve.api.thoughts import Expects, Thoughts
from lockstep.serve.params import Output


@dataclass(frozen=True)
class Said:
    """What one more output adds."""

    thought: str
    text: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    """All of them come with the last output."""


class Speech:
    """`push` each output of the choice. What was pushed, joined, does not depend on how it was cut.

    names: of the tools that were offered; with some, text that may become a call waits until it is known what it is.
    """

    def __init__(self, expects: Expects, names: Sequence[str]) -> None:
        self.thought = self.text = ""
        self.calls: list[dict[str, Any]] = []
        self._thoughts, self._names = Thoughts(expects), names
        self._answer = ""
        self._offsets: list[int] = []

    def push(self, output: Output) -> Said:
        last = output.finish_reason is not None
        self._offsets += output.text_offsets
        thought, answer = self._thoughts.push(output.text, last)
        said = Said(thought, *(self._called(answer, last) if self._names else (answer, [])))
        self.thought, self.text, self.calls = self.thought + said.thought, self.text + said.text, said.calls
        return said

    @property
    def thought_tokens(self) -> int:
        """Tokens that were thought, not said."""
        return self._thoughts.tokens(self._offsets)

    def _called(self, answer: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        self._answer += answer
        if not last:
            return tools.plain(self._answer)[len(self.text) :], []
        content, calls = tools.parse(self._answer, self._names)
        return (content or "")[len(self.text) :], calls
