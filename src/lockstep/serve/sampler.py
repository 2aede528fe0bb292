"""From a row of logits to a token. The draw depends on (seed, choice, position) and on the row alone.

Everything is float64 NumPy over one row at a time, so a batch cannot change it. The uniform number comes from
Philox, a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.serve.params import SamplingParams

Row = NDArray[np.float32]


def draw_seed() -> int:
    """A fresh seed for a request that brought none, below 2**63 so that every JSON reader keeps it."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0] >> np.uint64(1))


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1) that belongs to this place of this choice, whenever and wherever it is asked for."""
    key = np.array([seed % 2**64, choice], dtype=np.uint64)
    generator = np.random.Philox(key=key, counter=np.array([position, 0, 0, 0], dtype=np.uint64))
    return float(generator.random_raw() >> 11) * 2.0**-53


def sample(logits: Row, params: SamplingParams, prompt: list[int], generated: list[int], seed: int, choice: int) -> int:
    """The next token. logits float32 [V]; the position of the draw is that of the token drawn."""
    row = _adjusted(logits, params, prompt, generated)
    if params.temperature == 0.0:
        return int(row.argmax())
    number = uniform(seed, choice, len(prompt) + len(generated))
    if params.top_k <= 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _draw(_weights(row, params.temperature), number)
    kept = _candidates(row, params)
    return int(kept[_draw(_weights(row[kept], params.temperature), number)])


def _weights(row: NDArray[np.floating], temperature: float) -> NDArray[np.float64]:
    """Probabilities up to a factor; the largest is 1."""
    wide = row.astype(np.float64)
    wide -= wide.max()
    with np.errstate(over="ignore"):
        wide /= temperature
    return np.exp(wide, out=wide)


def _draw(weights: NDArray[np.float64], number: float) -> int:
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return min(index, len(weights) - 1)


def _candidates(row: NDArray[np.floating], params: SamplingParams) -> NDArray[np.int64]:
    """The ids that min_p, top_k and top_p leave, most probable first (the lower id first among equals)."""
    ids = np.arange(len(row))
    if params.min_p > 0.0:
        ids = ids[_weights(row, params.temperature) >= params.min_p]
    if 0 < params.top_k < len(ids):
        # Everything above the k-th value is in; among those equal to it the lowest ids are.
        values = row[ids]
        edge = np.partition(values, len(ids) - params.top_k)[len(ids) - params.top_k]
        above, equal = ids[values > edge], ids[values == edge]
        ids = np.sort(np.concatenate([above, equal[: params.top_k - len(above)]]))
    ids = ids[np.argsort(-row[ids], kind="stable")]
    if params.top_p < 1.0:
        cumulative = np.cumsum(_weights(row[ids], params.temperature))
        ids = ids[: int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1]
    return ids


def _adjusted(logits: Row, params: SamplingParams, prompt: list[int], generated: list[int]) -> NDArray[np.floating]:
    """Penalties and bias on a copy; the row itself when there are none."""
    repetition, frequency, presence = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    if repetition == 1.0 and not frequency and not presence and not params.logit_bias:
        return logits
    row = logits.astype(np.float64)
    if repetition != 1.0:
        seen = np.unique(np.asarray(prompt + generated, dtype=np.int64))
        row[seen] = np.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
    if (frequency or presence) and generated:
        seen, counts = np.unique(np.asarray(generated, dtype=np.int64), return_counts=True)
        row[seen] -= frequency * counts + presence
    for token, bias in params.logit_bias.items():
        row[token] += bias
    return row
