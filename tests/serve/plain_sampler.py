"""The sampler in its plainest form, with NumPy's own generator and whole sorts: the oracle of every draw."""

from __future__ import annotations

import numpy as np

from lockstep.serve.params import SamplingParams
from lockstep.serve.sampler import adjusted


def uniform(seed: int, choice: int, position: int) -> float:
    key = np.array([seed % 2**64, choice], dtype=np.uint64)
    generator = np.random.Philox(key=key, counter=np.array([position, 0, 0, 0], dtype=np.uint64))
    return float(generator.random_raw() >> 11) * 2.0**-53


def sample(row: np.ndarray, params: SamplingParams, tokens: list[int], prompt_length: int, seed: int, choice: int):
    row = adjusted(row, params, tokens, prompt_length)
    if params.temperature == 0.0:
        return int(row.argmax())
    number = uniform(seed, choice, len(tokens))
    with np.errstate(over="ignore"):
        weights = np.exp((row - row.max()) / np.float32(max(params.temperature, 1e-30)))
    if params.top_k <= 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        return draw(weights, number)
    kept = candidates(weights, params)
    return int(kept[draw(weights[kept], number)])


def draw(weights: np.ndarray, number: float) -> int:
    starts = np.arange(0, len(weights), 256)
    block, rest = place(np.add.reduceat(weights, starts), number)
    index, _ = place(weights[starts[block] : starts[block] + 256], rest)
    return int(starts[block]) + index


def place(weights: np.ndarray, number: float) -> tuple[int, float]:
    running = np.cumsum(weights, dtype=np.float64)
    target = number * running[-1]
    last = int(np.searchsorted(running, running[-1], side="left"))
    index = min(int(np.searchsorted(running, target, side="right")), last)
    before = running[index - 1] if index else 0.0
    return index, min(max((target - before) / float(weights[index]), 0.0), 1.0 - 2.0**-53)


def candidates(weights: np.ndarray, params: SamplingParams) -> np.ndarray:
    order = np.argsort(-weights, kind="stable")
    total = np.sum(weights, dtype=np.float64)
    if 0 < params.top_k < len(weights) or params.min_p > 0.0:
        order = order[weights[order] >= np.float32(params.min_p)]
        order = order[: params.top_k] if params.top_k > 0 else order
        total = np.sum(weights[order], dtype=np.float64)
    if params.top_p >= 1.0:
        return order
    cumulative = np.cumsum(weights[order], dtype=np.float64)
    return order[: int(np.searchsorted(cumulative, params.top_p * total)) + 1]
