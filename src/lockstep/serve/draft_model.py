"""Speculative decoding with a draft model: a small model of the same vocabulary runs ahead of the large one."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lockstep.errors import LockstepError
from lockstep.ops import PAGE
from lockstep.serve.check import check_vocabulary
from lockstep.serve.drafting import Wish
from lockstep.serve.pool import PagePool
from lockstep.serve.runner import Level, Runner
from lockstep.serve.sampler import sample
from lockstep.serve.scheduler import Chunk, Step
from lockstep.serve.sequence import Sequence

if TYPE_CHECKING:
    from lockstep.model import Model


@dataclass
class _Shadow:
    """What the draft model has of a sequence: the tokens whose keys and values lie in its pages."""

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class DraftModel:
    """A small model of the same vocabulary that guesses by running ahead, all sequences in one batch.

    pages: KV pages of its own. max_batch_tokens: tokens of one of its passes; a longer prompt is caught up with over
    several steps of the engine, without guesses until then.
    """

    def __init__(self, model: Model, pages: int, max_batch_tokens: int, level: Level = "O2") -> None:
        self._runner = Runner(model, pages, None, max_batch_tokens, level)
        self._pool = PagePool(pages)
        self._longest = model.config.max_positions
        self._max_batch_tokens = max_batch_tokens
        self._shadows: dict[int, _Shadow] = {}

    def guess(self, wishes: Many[Wish]) -> list[list[int]]:
        guesses: dict[int, list[int]] = {sequence.uid: [] for sequence, _ in wishes}
        going = self._begin(wishes)
        while going:
            rows = self._pass([s for s, _ in going], guesses)
            ahead = []
            for (sequence, count), row in zip(going, rows, strict=True):
                if row is None or np.isnan(row).any():  # a damaged draft model costs speed, no output
                    continue
                guessed = guesses[sequence.uid]
                guessed.append(_drawn(sequence, guessed, row))
                if len(guessed) < count:
                    ahead.append((sequence, count))
            going = ahead
        return [guesses[sequence.uid] for sequence, _ in wishes]

    def forget(self, sequence: Sequence) -> None:
        shadow = self._shadows.pop(sequence.uid, None)
        if shadow is not None:
            self._pool.give_back(shadow.pages)

    def _begin(self, wishes: Many[Wish]) -> list[Wish]:
        """The sequences that there are pages and positions for, rid of guesses that were wrong."""
        asking = {sequence.uid for sequence, _ in wishes}
        going = []
        for sequence, count in wishes:
            shadow = self._shadows.setdefault(sequence.uid, _Shadow())
            shadow.tokens = shadow.tokens[: _agreeing(shadow.tokens, sequence.tokens)]
            count = min(count, self._longest - len(sequence.tokens))
            if count > 0 and self._reserve(shadow, len(sequence.tokens) + count - 1, asking):
                going.append((sequence, count))
        return going

    def _reserve(self, shadow: _Shadow, tokens: int, asking: set[int]) -> bool:
        """Pages for so many tokens, if it must be from sequences that do not ask (they wait, or are preempted)."""
        missing = -(-tokens // PAGE) - len(shadow.pages)
        for uid in [uid for uid in self._shadows if uid not in asking]:
            if missing <= self._pool.free:
                break
            self._pool.give_back(self._shadows.pop(uid).pages)
        if missing > self._pool.free:
            return False
        shadow.pages += self._pool.take(max(missing, 0))
        return True

    def _pass(self, sequences: list[Sequence], guesses: dict[int, list[int]]) -> list[np.ndarray | None]:
        """One pass over what each sequence lacks; its last row of logits, None while it is still behind."""
        left, chunks, rows, whole = self._max_batch_tokens, [], [], []
        for sequence in sequences:
            shadow = self._shadows[sequence.uid]
            start = len(shadow.tokens)
            lacking = [*sequence.tokens, *guesses[sequence.uid]][start:]
            new = lacking[:left]
            left -= len(new)
            whole.append(len(new) == len(lacking))
            if new:
                shadow.tokens += new
                chunks.append(Chunk(sequence.uid, start, tuple(new), tuple(shadow.pages), whole[-1]))
                if whole[-1]:
                    rows.append(self._max_batch_tokens - left - 1)
        logits = iter(self._runner.run(Step(tuple(chunks)), rows)[1].numpy())
        return [next(logits) if known else None for known in whole]


def check_draft(draft: Model, model: Model) -> None:
    """LockstepError where the two models do not speak of the same tokens."""
    check_vocabulary(draft.config, model.config)
    if draft.has_tokenizer and model.has_tokenizer and not model.tokenizer.same_vocabulary(draft.tokenizer):
        raise LockstepError("the draft model's tokenizer numbers tokens differently: give one of the same family.")


def _drawn(sequence: Sequence, guessed: list[int], row: np.ndarray) -> int:
    """What would be drawn from this row: with the request's seed, so that like distributions give like tokens."""
    tokens = [*sequence.tokens, *guessed]
    return sample(row, sequence.params, tokens, sequence.prompt_length, sequence.seed, sequence.choice)


def _agreeing(known: list[int], tokens: list[int]) -> int:
    """The length of the common beginning; the newest token is always left to be computed."""
    most = min(len(known), len(tokens) - 1)
    if known[:most] == tokens[:most]:
        return most
    return next(i for i in range(most) if known[i] != tokens[i])
