"""Every draw is that of the plainest sampler, whatever is done to make it faster."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.serve import Engine, SamplingParams
from lockstep.serve.largest import edge, falling
from lockstep.serve.philox import philox
from lockstep.serve.sampler import sample, uniform
from lockstep.serve.scoring import _top
from tests.serve import plain_sampler


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**63))
def test_philox_is_numpy_s(first, second, counter):
    key = np.array([first, second], dtype=np.uint64)
    theirs = np.random.Philox(key=key, counter=np.array([counter, 0, 0, 0], dtype=np.uint64))
    assert philox((first, second), counter) == int(theirs.random_raw())


def test_philox_carries_into_the_second_word():
    theirs = np.random.Philox(key=[1, 2], counter=np.array([2**64 - 1, 0, 0, 0], dtype=np.uint64))
    assert philox((1, 2), 2**64 - 1) == int(theirs.random_raw())


@given(
    st.integers(0, 10**6), st.sampled_from([7, 320, 1000, 5000]), st.floats(0.05, 8), st.booleans(),
    st.sampled_from([0.0, 1e-9, 0.3, 1.0, 1.7]), st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]),
    st.sampled_from([-1, 0, 1, 5, 50, 400]), st.sampled_from([0.0, 0.05, 1.0]),
)  # fmt: skip
def test_draws_are_those_of_the_plain_sampler(seed, size, spread, ties, temperature, top_p, top_k, min_p):
    row = np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)
    row = np.round(row, 1) if ties else row
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    for choice in range(3):
        assert uniform(seed, choice, 3) == plain_sampler.uniform(seed, choice, 3)
        expected = plain_sampler.sample(row, params, [1, 2, 3], 2, seed, choice)
        assert sample(row, params, [1, 2, 3], 2, seed, choice) == expected


@given(
    st.integers(0, 10**6), st.sampled_from([0.0, 1.0, 1e30, 3e38]), st.floats(0, 100, exclude_min=True),
    st.floats(-2, 2), st.floats(-100, 100), st.sampled_from([0.0, 5e-324, 1.0, 2.0]),
    st.sampled_from([0.0, 1e-300, 1.0]), st.sampled_from([-1, 1, 16]), st.sampled_from([0.0, 5e-324, 1.0]),
    st.booleans(),
)  # fmt: skip
@example(0, 1.0, 5e-324, 0.0, 0.0, 1.0, 1.0, 16, 0.0, False)
def test_no_parameter_leads_out_of_the_finite_numbers(
    seed, spread, repetition, penalty, bias, temperature, top_p, top_k, min_p, masked
):  # fmt: skip
    draw = np.random.default_rng(seed)
    row = np.clip(draw.uniform(-1, 1, 300) * spread, -3.4e38, 3.4e38).astype(np.float32)
    params = SamplingParams(
        repetition_penalty=repetition, frequency_penalty=penalty, presence_penalty=-penalty, logit_bias={2: bias},
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
    )  # fmt: skip
    allowed = draw.random(300) < 0.1 if masked else None
    if masked:
        allowed[7] = True
    token = sample(row, params, [0, 1, 2, 3, 3, 4], 3, seed, 0, allowed)
    assert allowed is None or allowed[token]
    if not masked:
        assert token == plain_sampler.sample(row, params, [0, 1, 2, 3, 3, 4], 3, seed, 0)


@given(st.integers(0, 10**6), st.integers(1, 6000), st.integers(1, 60), st.booleans())
def test_the_largest_are_those_of_a_whole_sort(seed, size, count, ties):
    row = np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)
    row = np.round(row) if ties else row
    count = min(count, size)
    assert edge(row, count) == np.sort(row)[-count]
    best = np.argsort(-row, kind="stable")[:count]
    assert _top(row, count) == tuple((int(i), float(row[i])) for i in best)
    weights = np.abs(row)
    ids = np.flatnonzero(weights > 0.5)
    assert (falling(weights[ids], ids) == ids[np.argsort(-weights[ids], kind="stable")]).all()


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_mixed_batch_draws_and_scores_as_each_alone(model, drafts):
    engine = Engine(model, drafts=drafts, debug=True)
    kinds = [{}, {"logprobs": 0}, {"top_p": 0.9, "logprobs": 3}, {"top_k": 5}, {"temperature": 0.0, "logprobs": 3}]
    asked = [
        SamplingParams(max_tokens=24, seed=seed, ignore_eos=True, prompt_logprobs=seed % 3 or None, **kinds[seed % 5])
        for seed in range(10)
    ]
    prompts = [[3 + seed, 9, 8] * (seed + 2) for seed in range(10)]
    alone = Engine(model)
    for prompt, params, done in zip(prompts, asked, engine.generate(prompts, asked), strict=True):
        (single,) = alone.generate([prompt], params)
        for name in ("token_ids", "logprobs", "top_logprobs", "prompt_logprobs"):
            assert getattr(done, name) == getattr(single, name)
