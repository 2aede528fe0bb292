"""The draws of one step: for each sequence the next token, and one more after each guess that was right."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from numpy.typing import NDArray
from torch import Tensor

from lockstep.ops.called import largest
from lockstep.serve.sampler import sample
from lockstep.serve.scoring import Reading
from lockstep.serve.structured import Guide, GuideStuck

log = logging.getLogger("lockstep.serve")
DAMAGED = "the model gave numbers that are NaN or infinite: its weights are damaged."


@dataclass(frozen=True)
class Draw:
    """The tokens that plain decoding draws, one or more; none with an error."""

    tokens: tuple[int, ...]
    error: str | None = None
    refused: bool = False
    """The error is the request's, not the model's."""


def draw_all(plan: Sequence[Reading], logits: Tensor, guides: Mapping[int, Guide]) -> list[Draw]:
    """Draw what `plan` (whose readings all draw) is to draw, and append it to the sequences."""
    # On this thread: to wake others for so little takes longer. NumPy is asked only where something is sampled.
    best, plain = largest(logits), not guides and all(reading.sequence.params.takes_best for reading in plan)
    rows = None if plain else logits.numpy()
    return [_draw(reading, rows, best, guides.get(reading.sequence.uid)) for reading in plan]


def _draw(reading: Reading, rows: NDArray | None, best: list[int], guide: Guide | None) -> Draw:
    first = reading.first + len(reading.scored)
    mine = range(first, first + 1 + len(reading.draft or ()))
    if any(best[row] < 0 for row in mine):
        return Draw((), DAMAGED)
    try:
        return Draw(tuple(_tokens(reading, rows, best, mine, guide)))
    except GuideStuck as stuck:
        return Draw((), str(stuck), refused=True)
    except Exception as error:  # a bug, which one request meets: the others go on
        log.exception("a token could not be drawn with %s", reading.sequence.params)
        return Draw((), f"this is a bug: {type(error).__name__}: {error}")


def _tokens(reading: Reading, rows: NDArray | None, best: list[int], mine: range, guide: Guide | None) -> list[int]:
    """best: the place of each row's largest logit, which is all that is asked for where nothing is adjusted. rows: the
    logits, where that is not so of all."""
    sequence = reading.sequence
    tokens, params, start = sequence.tokens, sequence.params, sequence.prompt_length
    drawn: list[int] = []
    for row, guess in zip(mine, (*(reading.draft or ()), None), strict=True):
        if rows is None or (guide is None and params.takes_best):
            token = best[row]
        else:
            allowed = None if guide is None else guide.allowed()
            token = sample(rows[row], params, tokens, start, sequence.seed, sequence.choice, allowed)
        tokens.append(token)
        drawn.append(token)
        if guide is not None:
            guide.accept(token)
        if token != guess or (guide is not None and guide.finished):
            break
    return drawn
