"""The draws of one step: for each sequence the next token, and one more after each guess that was right."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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
    rows = logits.numpy()
    # By NumPy, on this thread: to wake PyTorch's threads for so little takes longer, while others use the cores.
    damaged = ~np.isfinite(rows.max(-1))
    return [_draw(reading, rows, damaged, guides.get(reading.sequence.uid)) for reading in plan]


def _draw(reading: Reading, rows: NDArray, damaged: NDArray, guide: Guide | None) -> Draw:
    draft = reading.draft or ()
    first = reading.first + len(reading.scored)
    if damaged[first : first + 1 + len(draft)].any():
        return Draw((), DAMAGED)
    try:
        return Draw(tuple(_tokens(reading, rows[first : first + 1 + len(draft)], guide)))
    except GuideStuck as stuck:
        return Draw((), str(stuck), refused=True)
    except Exception as error:  # a bug, which one request meets: the others go on
        log.exception("a token could not be drawn with %s", reading.sequence.params)
        return Draw((), f"this is a bug: {type(error).__name__}: {error}")


def _tokens(reading: Reading, rows: NDArray, guide: Guide | None) -> list[int]:
    sequence = reading.sequence
    tokens, params, start = sequence.tokens, sequence.params, sequence.prompt_length
    drawn: list[int] = []
    for row, guess in zip(rows, (*(reading.draft or ()), None), strict=True):
        allowed = None if guide is None else guide.allowed()
        token = sample(row, params, tokens, start, sequence.seed, sequence.choice, allowed)
        tokens.append(token)
        drawn.append(token)
        if guide is not None:
            guide.accept(token)
        if token != guess or (guide is not None and guide.finished):
            break
    return drawn
