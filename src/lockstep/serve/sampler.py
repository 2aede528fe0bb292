"""From a row of logits to a token. The draw depends on (seed, choice, position) and on the row alone.

Everything is NumPy over one row at a time, so a batch cannot change it. The uniform number comes from
Philox, a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lockstep.serve.largest import edge, falling
from lockstep.serve.params import SamplingParams
from lockstep.serve.philox import philox
from lockstep.serve.structured import Allowed

Row = NDArray[np.float32]
_BLOCK = 256
_BELOW_ONE = 1.0 - 2.0**-53
_COLDEST = 1e-30
"""Smaller temperatures are this one: float32 has no smaller normal numbers to divide by."""
_LARGEST = float(np.finfo(np.float32).max)
_REACHES = (1e-3, 1e-5)
"""Weights, beside the largest of 1, that are tried as the least of what top_p keeps."""
_SURELY = 1.000001
"""Sums in another order differ by less."""


def draw_seed() -> int:
    """A fresh seed for a request that brought none, below 2**63 so that every JSON reader keeps it."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0] >> np.uint64(1))


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1) that belongs to this place of this choice, whenever and wherever it is asked for."""
    return (philox((seed % 2**64, choice), position) >> 11) * 2.0**-53


def sample(
    logits: Row,
    params: SamplingParams,
    tokens: list[int],
    prompt_length: int,
    seed: int,
    choice: int,
    allowed: Allowed | None = None,
) -> int:
    """The next token after these, the first of which are the prompt. logits float32 [V]; the position of the draw is
    that of the token drawn.

    allowed: bool [V], the tokens that may be drawn, at least one; None: all.
    """
    row = adjusted(logits, params, tokens, prompt_length)
    if allowed is not None:
        row = np.where(allowed, row, np.float32(-np.inf))
    if params.temperature == 0.0:
        return int(row.argmax())
    number = uniform(seed, choice, len(tokens))
    weights = _weights(row, params.temperature)
    if params.top_k <= 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _draw(weights, number)
    kept = _candidates(weights, params)
    return int(kept[_draw(weights[kept], number)])


def _weights(row: Row, temperature: float) -> Row:
    """Probabilities up to a factor, float32; the largest is 1."""
    with np.errstate(over="ignore"):
        shifted = row - row.max()
        if temperature != 1.0:
            shifted /= np.float32(max(temperature, _COLDEST))
    return np.exp(shifted, out=shifted)


def _draw(weights: Row, number: float) -> int:
    """The index at which the running sum passes `number` of the whole: first the block, then the place in it."""
    block, rest = _pass(np.add.reduceat(weights, _starts(len(weights))), number)
    index, _ = _pass(weights[block * _BLOCK : (block + 1) * _BLOCK], rest)
    return block * _BLOCK + index


@lru_cache(maxsize=4096)
def _starts(length: int) -> NDArray[np.intp]:
    return np.arange(0, length, _BLOCK)


def _pass(weights: Row, number: float) -> tuple[int, float]:
    """(where the running sum passes `number` of the whole, how far into that weight, as a part of it)."""
    running = weights.cumsum(dtype=np.float64)
    whole = float(running[-1])
    target = number * whole
    if target < whole:
        index = int(running.searchsorted(target, side="right"))
    else:
        index = int(running.searchsorted(whole, side="left"))  # the last weight that is not 0
    before = float(running[index - 1]) if index else 0.0
    return index, min(max((target - before) / float(weights[index]), 0.0), _BELOW_ONE)


def _candidates(weights: Row, params: SamplingParams) -> NDArray[np.intp]:
    """The ids that min_p, top_k and top_p leave, most probable first (the lower id first among equals)."""
    if 0 < params.top_k < len(weights):
        least = max(params.min_p, float(edge(weights, params.top_k)))
        ids = _falling(weights, least)[: params.top_k]
        total = np.sum(weights[ids], dtype=np.float64)
    elif params.min_p > 0.0:
        ids = _falling(weights, params.min_p)
        total = np.sum(weights[ids], dtype=np.float64)
    else:
        total = np.sum(weights, dtype=np.float64)
        ids = _head(weights, params.top_p * total)
    if params.top_p >= 1.0:
        return ids
    cumulative = weights[ids].cumsum(dtype=np.float64)
    return ids[: int(cumulative.searchsorted(params.top_p * total)) + 1]


def _head(weights: Row, mass: float) -> NDArray[np.intp]:
    """So many of the most probable ids that their weights reach `mass`; seldom is a whole vocabulary sorted."""
    for reach in _REACHES:
        ids = np.flatnonzero(weights >= np.float32(reach))
        likely = weights[ids]
        if np.sum(likely, dtype=np.float64) >= mass * _SURELY:
            break
    else:
        return _falling(weights, 0.0)
    for least in (reach * 100, reach * 30, reach * 10, reach * 3):
        enough = likely >= np.float32(least)
        if np.sum(likely[enough], dtype=np.float64) >= mass * _SURELY:
            return falling(likely[enough], ids[enough])
    return falling(likely, ids)


def _falling(weights: Row, least: float) -> NDArray[np.intp]:
    """The ids of weights of at least `least`, the largest first, the lower id first among equals."""
    ids = np.flatnonzero(weights >= np.float32(least))
    return falling(weights[ids], ids)


def adjusted(logits: Row, params: SamplingParams, tokens: list[int], prompt_length: int) -> Row:
    """Penalties and bias on a copy; the row itself when there are none. Finite where the logits are: a tiny
    repetition penalty leads to the largest number there is, and not beyond."""
    if not params.adjusts:
        return logits
    repetition, frequency, presence = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    row = logits.astype(np.float64)
    if repetition != 1.0:
        seen = np.unique(np.asarray(tokens, dtype=np.int64))
        with np.errstate(over="ignore"):
            row[seen] = np.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
    if (frequency or presence) and len(tokens) > prompt_length:
        seen, counts = np.unique(np.asarray(tokens[prompt_length:], dtype=np.int64), return_counts=True)
        row[seen] -= frequency * counts + presence
    if params.logit_bias:
        biased, by = params.bias
        row[biased] += by
    return row.clip(-_LARGEST, _LARGEST).astype(np.float32)
