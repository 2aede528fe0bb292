"""The output of one choice as it grows: tokens are held until they have text that may be shown."""

from __future__ import annotations

from lockstep.serve.params import FinishReason, Output, TokenScore
from lockstep.serve.sequence import Sequence
from lockstep.serve.text import Decode, TextStream


class OutputStream:
    """`push` each token, `take` what may be told; `finish` once."""

    def __init__(self, sequence: Sequence, decode: Decode) -> None:
        self._sequence = sequence
        self._text = TextStream(decode, sequence.params.stop)
        self._prompt_scores: list[TokenScore] = []
        self._told = False
        self._clear()

    def score_prompt(self, scores: tuple[TokenScore, ...]) -> None:
        self._prompt_scores += scores

    def push(self, token: int, scores: tuple[TokenScore, ...], hidden: bool = False) -> str | None:
        """A token was drawn; gives the stop string it completes. hidden: it has no text (it ended the choice)."""
        self._offsets.append(self._text.length)
        self._tokens.append(token)
        self._scores += scores
        if hidden:
            return None
        text, stop = self._text.push(token)
        self._new += text
        return stop

    @property
    def has_text(self) -> bool:
        return bool(self._new)

    def take(
        self,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
        error: str | None = None,
        refused: bool = False,
    ) -> Output:
        """Everything since the last time."""
        asked = self._sequence.params.prompt_logprobs is not None and not self._told
        output = Output(
            self._sequence.request,
            self._sequence.choice,
            self._new,
            tuple(self._tokens),
            tuple(self._scores),
            tuple(self._offsets),
            tuple(self._prompt_scores) if asked else None,
            finish_reason,
            stop_reason,
            self._sequence.cached_tokens or 0,
            error,
            refused,
        )
        self._told = True
        self._clear()
        return output

    def finish(
        self, reason: FinishReason, stop: str | int | None = None, error: str | None = None, refused: bool = False
    ) -> Output:
        """The last output. Text that was held back is told, unless a stop string ended it."""
        if not isinstance(stop, str):
            text, found = self._text.finish()
            self._new += text
            if found is not None:
                reason, stop = "stop", found
        return self.take(reason, stop, error, refused)

    def _clear(self) -> None:
        self._new = ""
        self._tokens: list[int] = []
        self._scores: list[TokenScore] = []
        self._offsets: list[int] = []
