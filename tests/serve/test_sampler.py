"""The sampler against plain definitions, and the draw's independence of everything but (seed, choice, position)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import LockstepError
from lockstep.serve.params import SamplingParams
from lockstep.serve.sampler import adjusted, draw_seed, sample, uniform


def logits(seed: int = 0, size: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)


def draws(row: np.ndarray, count: int = 400, generated: tuple[int, ...] = (), prompt: tuple[int, ...] = (1,), **params):
    made = SamplingParams(**params)
    return [sample(row, made, [*prompt, *generated], len(prompt), seed, 0) for seed in range(count)]


def test_greedy_takes_the_lowest_of_equal_tokens():
    row = np.array([1, 3, 3, 2], dtype=np.float32)
    assert draws(row, 3, temperature=0.0) == [1, 1, 1]


def test_uniform_is_a_function_of_seed_choice_and_position():
    assert uniform(5, 0, 9) == uniform(5, 0, 9)
    several = {uniform(s, c, p) for s in (0, 1, -1, 2**63) for c in (0, 1) for p in (0, 1, 2**31)}
    assert len(several) == 24
    assert all(0 <= number < 1 for number in several)
    mean = np.mean([uniform(7, 0, p) for p in range(4000)])
    assert abs(mean - 0.5) < 0.02  # standard deviation of the mean: 0.0046


def test_seeds_drawn_are_different_and_fit_json():
    seeds = {draw_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_frequencies_follow_the_tempered_softmax():
    row = logits(size=8)
    for temperature in (0.5, 1.0, 1.7):
        counts = np.bincount(draws(row, 4000, temperature=temperature), minlength=8) / 4000
        expected = np.exp(row.astype(np.float64) / temperature)
        expected /= expected.sum()
        # Four standard deviations of a frequency over 4000 draws, at most 0.032.
        assert np.abs(counts - expected).max() < 0.032


@given(st.integers(0, 10**6), st.integers(1, 60), st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 3))
def test_filters_keep_what_their_definitions_say(seed, top_k, top_p, min_p, temperature):
    row = np.round(logits(seed), 1)  # with ties
    token = sample(row, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), [1], 1, seed, 0)
    wide = row.astype(np.float64) / temperature
    p = np.exp(wide - wide.max())
    order = sorted((i for i in range(len(row)) if p[i] >= min_p), key=lambda i: (-row[i], i))[:top_k]
    kept, total, mass = [], 0.0, sum(p[i] for i in order)
    for i in order:
        kept.append(i)
        total += p[i]
        if total >= top_p * mass * (1 + 1e-12):
            break
    # Sums in another order may differ in the last bits: the next token may be in.
    assert token in kept or token in order[: len(kept) + 1]


def test_top_p_zero_and_top_k_one_are_greedy():
    row = logits(3)
    assert set(draws(row, 20, top_p=0.0)) == set(draws(row, 20, top_k=1)) == {int(row.argmax())}


def test_top_k_with_ties_keeps_the_lowest_ids():
    row = np.array([0, 5, 5, 5, 5], dtype=np.float32)
    assert set(draws(row, 200, top_k=2)) == {1, 2}


def test_logit_bias_bans_and_forces():
    row = logits(4)
    best = int(row.argmax())
    assert best not in draws(row, 200, logit_bias={best: -100})
    assert set(draws(row, 50, logit_bias={7: 100})) == {7}
    biases = {token: (token % 7) / 3 - 1 for token in range(len(row))}
    one_by_one = row.astype(np.float64)
    for token, bias in biases.items():
        one_by_one[token] += bias
    changed = adjusted(row, SamplingParams(logit_bias=biases), [0], 1)
    assert changed.tobytes() == one_by_one.astype(np.float32).tobytes()


def test_presence_and_frequency_penalties_count_generated_tokens_only():
    row = np.array([1.0, 0.9, 0.0], dtype=np.float32)
    assert draws(row, 1, temperature=0.0, presence_penalty=2.0, prompt=(0, 0)) == [0]
    assert draws(row, 1, (0,), temperature=0.0, presence_penalty=2.0) == [1]
    assert draws(row, 1, (0,), temperature=0.0, frequency_penalty=0.05) == [0]
    assert draws(row, 1, (0, 0, 0), temperature=0.0, frequency_penalty=0.05) == [1]


def test_repetition_penalty_counts_the_prompt_too():
    row = np.array([2.0, 1.5, -1.0], dtype=np.float32)
    assert draws(row, 1, temperature=0.0, repetition_penalty=1.5, prompt=(0,)) == [1]
    assert draws(np.array([-1.0, -1.2], np.float32), 1, temperature=0.0, repetition_penalty=2.0, prompt=(0,)) == [1]


def test_a_tiny_temperature_is_greedy_and_says_nothing():
    row = logits(5)
    assert set(draws(row, 20, temperature=1e-300)) == {int(row.argmax())}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -2}, "top_k is -2"),
        ({"min_p": 2.0}, "min_p is 2"),
        ({"n": 0}, "n is 0"),
        ({"presence_penalty": 3.0}, "presence_penalty is 3"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"stop": ("",)}, "empty string"),
        ({"logit_bias": {1: 101.0}}, "logit_bias of token 1"),
        ({"logprobs": 21}, "logprobs is 21"),
    ],
)
def test_wrong_parameters_are_named(wrong, named):
    with pytest.raises(LockstepError, match=named):
        SamplingParams(**wrong)
