"""What a request asks of the engine, and what it gets: sampling parameters, pieces of output, completions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import LockstepError
from lockstep.serve.structured import StructuredOutputs

FinishReason = Literal["stop", "length", "abort", "timeout"]
Pooling = Literal["mean", "last"]
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn.

    The order of the steps on a row of logits: repetition, frequency and presence penalties, logit bias,
    the tokens that `structured_outputs` allows, temperature, min_p, top_k, top_p (each on what the one before
    left), one draw.
    Raises LockstepError when a value is outside its range.
    """

    temperature: float = 1.0
    """0 takes the most probable token (the lowest id among equals); at most 2 is useful."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose probabilities reach this sum (0: the first); in [0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the most probable one; in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token already generated; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time the token was generated; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive (multiplies negative) logits of tokens of the prompt and the output; above 0."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids; each in [-100, 100]."""
    seed: int | None = None
    """The draw depends on (seed, choice, position) alone. None: the engine draws a seed and reports it."""
    n: int = 1
    """Choices for this prompt."""
    max_tokens: int | None = 16
    """The most tokens to generate; None: up to the context's end. 0 only scores the prompt."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings; the text leaves it out."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after one of these tokens; the text leaves it out."""
    ignore_eos: bool = False
    """Go on past the tokenizer's end tokens."""
    logprobs: int | None = None
    """0: the log-probability of each generated token; k: also the k most probable ones; None: neither."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt (the first has none)."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the completion must have (a mapping with its fields will do); it ends when that is complete."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "structured_outputs", _structure(self.structured_outputs))
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not math.isfinite(value) or not low <= value <= high:
                raise LockstepError(f"{name} is {value}: give a number from {low:g} to {high:g}.")
        if self.repetition_penalty == 0.0:
            raise LockstepError("repetition_penalty is 0: give a number above 0 (1 means no penalty).")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise LockstepError(f"max_tokens is {self.max_tokens}: give 0 or more.")
        if any(not text for text in self.stop):
            raise LockstepError("stop holds an empty string, which matches everywhere: remove it.")
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise LockstepError(f"logit_bias of token {token} is {bias}: give a number from -100 to 100.")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
                raise LockstepError(f"{name} is {value}: give a whole number from 0 to {MAX_TOP_LOGPROBS}.")

    @cached_property
    def bias(self) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """logit_bias as arrays, made once: a request may name every token of the vocabulary, at every draw."""
        count = len(self.logit_bias)
        return np.fromiter(self.logit_bias, np.intp, count), np.fromiter(self.logit_bias.values(), np.float64, count)

    @property
    def adjusts(self) -> bool:
        """Logits are changed before anything is drawn from them: a penalty, a bias."""
        plain = self.repetition_penalty == 1.0 and not self.frequency_penalty and not self.presence_penalty
        return not plain or bool(self.logit_bias)

    @property
    def takes_best(self) -> bool:
        """The token of the largest logit, as the model gives it."""
        return self.temperature == 0.0 and not self.adjusts


def _structure(given: StructuredOutputs | Mapping[str, Any] | None) -> StructuredOutputs | None:
    if given is None or isinstance(given, StructuredOutputs):
        return given
    try:
        return StructuredOutputs(**given)
    except TypeError as error:
        names = ", ".join(own.name for own in fields(StructuredOutputs))
        raise LockstepError(f"structured_outputs is {given!r}: give a mapping with one of {names}.") from error


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_k", -1, 2**31),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 100.0),
    ("n", 1, 128),
)


@dataclass(frozen=True)
class TokenScore:
    """One token under the raw distribution of the model (temperature 1, no penalty), float32 values."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens at this place with their log-probabilities, in falling order."""


@dataclass(frozen=True)
class Embedding:
    """Instead of tokens a request is given a vector: see `pooling.Pool`."""

    pooling: Pooling = "mean"
    unit: bool = True

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise LockstepError(f"pooling is {self.pooling!r}: give one of {', '.join(get_args(Pooling))}.")


@dataclass(frozen=True)
class Output:
    """What one step added to one choice of one request. Joining the pieces gives the completion."""

    request: int
    choice: int
    text: str = ""
    """New text: never half a UTF-8 character, never the beginning of what may become a stop string."""
    token_ids: tuple[int, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    """One for each of token_ids when log-probabilities were asked for."""
    text_offsets: tuple[int, ...] = ()
    """Where in the choice's text each of token_ids begins, in characters."""
    prompt_scores: tuple[TokenScore, ...] | None = None
    """Of the prompt from its second token on; with a choice's first output, when asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the cache."""
    error: str | None = None
    """Why the engine could not go on with this request (finish_reason is then `abort`)."""
    refused: bool = False
    """It is the request that asks for too much; otherwise the error is the engine's."""
    vector: bytes = b""
    """Of an embedding, with its last output: float32 [D], little-endian."""


@dataclass(frozen=True)
class Completion:
    """A finished choice. logprobs (float32 values) are of the raw model distribution; None if not asked for."""

    token_ids: list[int]
    text: str
    logprobs: list[float] | None
    finish_reason: FinishReason
    cached_tokens: int
    prompt_token_ids: list[int]
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float] | None = None
    stop_reason: str | int | None = None
    seed: int = 0
    prompt: int = 0
    """Index of its prompt in the call."""
    choice: int = 0
    error: str | None = None
    """Why the engine could not go on (finish_reason is then `abort`)."""


def join(outputs: list[Output]) -> Output:
    """All pieces of a finished choice as one."""
    last = outputs[-1]
    scored = [o.prompt_scores for o in outputs if o.prompt_scores is not None]
    return replace(
        last,
        text="".join(o.text for o in outputs),
        token_ids=tuple(token for o in outputs for token in o.token_ids),
        scores=tuple(score for o in outputs for score in o.scores),
        text_offsets=tuple(offset for o in outputs for offset in o.text_offsets),
        prompt_scores=scored[0] if scored else None,
    )


def completion(outputs: list[Output], prompt_ids: list[int], params: SamplingParams, **about: Any) -> Completion:
    """The completion of a finished choice from its pieces."""
    whole = join(outputs)
    assert whole.finish_reason is not None
    return Completion(
        token_ids=list(whole.token_ids),
        text=whole.text,
        logprobs=None if params.logprobs is None else [s.logprob for s in whole.scores],
        finish_reason=whole.finish_reason,
        cached_tokens=whole.cached_tokens,
        prompt_token_ids=prompt_ids,
        top_logprobs=[dict(s.top) for s in whole.scores] if params.logprobs else None,
        prompt_logprobs=None if whole.prompt_scores is None else [s.logprob for s in whole.prompt_scores],
        stop_reason=whole.stop_reason,
        error=whole.error,
        **about,
    )
