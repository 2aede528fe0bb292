"""Guesses of the tokens that come next, for speculative decoding. Whoever guesses, the output is the same.

A guess is verified by the model in one pass (Leviathan et al., arXiv 2211.17192). What is drawn depends on the model's
row, the seed and the position alone, so a guess is right when it is that very token: no acceptance rule is needed.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from lockstep.serve.sequence import Sequence

Wish = tuple[Sequence, int]
"""A decoding sequence and how many tokens to guess at most."""


class Drafter(Protocol):
    def guess(self, wishes: Many[Wish]) -> list[list[int]]:
        """For each sequence the tokens that may come next, none to as many as were wished for."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""


class PromptLookup:
    """Guesses what followed the last tokens the time before (`Sequence.guess`)."""

    def guess(self, wishes: Many[Wish]) -> list[list[int]]:
        return [sequence.guess(count) for sequence, count in wishes]

    def forget(self, sequence: Sequence) -> None:
        pass
