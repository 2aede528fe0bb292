"""Which rows of a step need logits, and the log-probabilities read from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lockstep.serve.params import TokenScore
from lockstep.serve.scheduler import Step
from lockstep.serve.sequence import Sequence


@dataclass(frozen=True)
class Reading:
    """What the logits of one sequence are for. Rows count within the logits that were computed."""

    sequence: Sequence
    first: int
    scored: range
    """Prompt places that the rows from `first` on score, in order."""
    draft: tuple[int, ...] | None
    """None: nothing is drawn. Else the rows after those give the next token and one after each guess."""
    computed: int
    """Known tokens of the chunk."""


def readings(step: Step, sequences: Mapping[int, Sequence]) -> tuple[list[int], list[Reading]]:
    """(rows of the packed step whose logits are needed, what each is for)."""
    rows: list[int] = []
    plan: list[Reading] = []
    base = 0
    for chunk in step.chunks:
        sequence = sequences[chunk.sequence]
        scored = range(0)
        first = len(rows)
        if sequence.scores_prompt:
            # The row of position p scores the token at p + 1.
            start, end = max(chunk.start, sequence.scored), min(chunk.end, sequence.prompt_length - 1)
            scored = range(start + 1, end + 1)
            rows += range(base + start - chunk.start, base + end - chunk.start)
        known = len(chunk.tokens) - chunk.drafts
        if chunk.samples:
            rows += range(base + known - 1, base + len(chunk.tokens))
        plan.append(Reading(sequence, first, scored, chunk.tokens[known:] if chunk.samples else None, known))
        base += len(chunk.tokens)
    return rows, plan


def scores(table: Tensor, tokens: list[int], top: int) -> tuple[TokenScore, ...]:
    """table float32 [len(tokens), V] of log-probabilities -> each token's own and the `top` largest of its row."""
    rows = table.numpy()
    return tuple(TokenScore(t, float(row[t]), _top(row, top)) for t, row in zip(tokens, rows, strict=True))


def _top(row: np.ndarray, count: int) -> tuple[tuple[int, float], ...]:
    """The most probable tokens of a row, the lower id first among equals."""
    if not count:
        return ()
    count = min(count, len(row))
    edge = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= edge)
    best = ids[np.argsort(-row[ids], kind="stable")][:count]
    return tuple((int(token), float(row[token])) for token in best)
