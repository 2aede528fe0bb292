"""Which rows of a step need logits, and the log-probabilities read from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch import Tensor

from lockstep.serve.largest import edge
from lockstep.serve.params import TokenScore
from lockstep.serve.runner import Runner
from lockstep.serve.scheduler import Step
from lockstep.serve.sequence import Sequence as Line


@dataclass(frozen=True)
class Reading:
    """What the rows of one sequence are for. Rows of logits count within those that were computed."""

    sequence: Line
    rows: range
    """Of the packed step."""
    first: int
    """Row of logits."""
    scored: range
    """Prompt places that the rows from `first` on score, in order."""
    draft: tuple[int, ...] | None
    """None: nothing is drawn. Else the rows after those give the next token and one after each guess."""
    computed: int
    """Known tokens of the chunk."""


def readings(step: Step, sequences: Mapping[int, Line]) -> tuple[list[int], list[Reading]]:
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
        draws = chunk.samples and len(sequence.tokens) < sequence.limit
        if draws:
            rows += range(base + known - 1, base + len(chunk.tokens))
        own = range(base, base + len(chunk.tokens))
        plan.append(Reading(sequence, own, first, scored, chunk.tokens[known:] if draws else None, known))
        base = own.stop
    return rows, plan


def scores(runner: Runner, logits: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenScore, ...]:
    """logits float32 [len(tokens), V] -> each token's log-probability and the `top` largest of its row."""
    if not tokens:
        return ()
    if not top:
        own = runner.select_logprobs(logits, list(tokens)).tolist()
        return tuple(TokenScore(token, value) for token, value in zip(tokens, own, strict=True))
    rows = runner.logprobs(logits).numpy()
    return tuple(TokenScore(t, float(row[t]), _top(row, top)) for t, row in zip(tokens, rows, strict=True))


def drawn_scores(
    runner: Runner, logits: Tensor, plan: Sequence[Reading], drawn: Sequence[tuple[int, ...]]
) -> list[tuple[TokenScore, ...]]:
    """For each reading the scores of the tokens drawn by it; none where they were not asked for. In one go: a row
    has its bits in any company."""
    rows: dict[int, list[int]] = {}
    """By how many of the most probable are wanted."""
    tokens: dict[int, list[int]] = {}
    for reading, some in zip(plan, drawn, strict=True):
        top, first = reading.sequence.params.logprobs, reading.first + len(reading.scored)
        if top is not None:
            rows.setdefault(top, []).extend(range(first, first + len(some)))
            tokens.setdefault(top, []).extend(some)
    told = {top: iter(scores(runner, _picked(logits, rows[top]), tokens[top], top)) for top in rows}
    return [
        () if r.sequence.params.logprobs is None else tuple(islice(told[r.sequence.params.logprobs], len(some)))
        for r, some in zip(plan, drawn, strict=True)
    ]


def _picked(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows, rising; a view where they lie side by side."""
    if rows and rows[-1] - rows[0] + 1 == len(rows):
        return logits[rows[0] : rows[-1] + 1]
    return logits[rows]


def _top(row: np.ndarray, count: int) -> tuple[tuple[int, float], ...]:
    """The most probable tokens of a row, the lower id first among equals."""
    if not count:
        return ()
    count = min(count, len(row))
    ids = np.flatnonzero(row >= edge(row, count))
    best = ids[np.argsort(-row[ids], kind="stable")][:count]
    return tuple((int(token), float(row[token])) for token in best)
