"""What the engine tells of itself: a moment's numbers, and why it refuses a request."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import LockstepError


class PromptTooLong(LockstepError):
    """The request does not fit into the model's context, or into the KV pages."""


class QueueFull(LockstepError):
    """There are as many waiting requests as the engine accepts; try again later."""


class RanksLost(LockstepError):
    """One of the processes that share the model has ended: nobody else has its part, and the others serve no more."""


@dataclass(frozen=True)
class Stats:
    """A moment's state of the engine, for metrics."""

    running: int
    waiting: int
    pages_total: int
    pages_used: int
    pages_cached: int
    preemptions: int
    steps: int
    computed_tokens: int
    """Tokens that went through the model, prompts and generated ones."""
    guessed_tokens: int
    """Of those, guesses."""
    right_guesses: int
