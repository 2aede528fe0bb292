"""Speculative decoding with a draft model: whatever it guesses, the output's bytes are those of plain decoding."""

from __future__ import annotations

import pytest
import torch

from lockstep.errors import LockstepError
from lockstep.serve import Engine, SamplingParams
from tests.serve.test_engine import bits, mixed_requests
from tests.serve.tiny import page_bytes, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def disturbed(noise: float, **changes: object):
    """A model that agrees with `tiny_model` now and then."""
    draft = tiny_model(**changes)
    generator = torch.Generator().manual_seed(5)
    for p in draft.decoder.parameters():
        p.data += noise * p.data.abs().mean() * torch.randn(p.shape, generator=generator)
    return draft


@pytest.mark.parametrize("noise", [0.0, 0.3, 100.0, float("nan")])
def test_guesses_right_or_wrong_give_the_bits_of_plain_decoding(model, noise):
    prompts, params = zip(*mixed_requests(10, model.config.vocab_size), strict=True)
    plain = Engine(model).generate(prompts, params)
    draft = disturbed(noise, num_layers=1) if noise == 100.0 else disturbed(noise)
    engine = Engine(model, draft_model=draft, kv_memory=60 * page_bytes(model), max_batch_tokens=48, debug=True)
    assert [bits(c) for c in engine.generate(prompts, params)] == [bits(c) for c in plain]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_agrees_saves_steps_at_any_temperature(model, temperature):
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True, logprobs=0)
    prompt = model.tokenizer.encode("the quick brown fox")
    plain, ahead = Engine(model), Engine(model, draft_model=tiny_model(), drafts=3, debug=True)
    a, b = plain.generate([prompt, prompt[2:]], params), ahead.generate([prompt, prompt[2:]], params)
    assert [bits(c) for c in a] == [bits(c) for c in b]
    stats = ahead.stats()
    # 40 tokens: the prompt's step draws one, each step after it draws a token and three right guesses.
    assert stats.steps <= 2 + 40 // 4 < plain.stats().steps
    assert stats.right_guesses == stats.guessed_tokens > 0


def test_a_prompt_longer_than_a_pass_is_caught_up_with(model):
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    prompt = (model.tokenizer.encode("def f(x): return x + 1") * 30)[:200]
    engine = Engine(model, draft_model=tiny_model(), max_batch_tokens=32, debug=True)
    (a,), (b,) = Engine(model).generate([prompt], params), engine.generate([prompt], params)
    assert a.token_ids == b.token_ids
    assert engine.stats().right_guesses > 0


def test_pages_of_the_draft_model_are_free_after_the_last_request(model):
    engine = Engine(model, draft_model=disturbed(0.3), kv_memory=24 * page_bytes(model), max_batch_tokens=32)
    prompts, params = zip(*mixed_requests(8, model.config.vocab_size), strict=True)
    engine.generate(prompts, params)
    pool = engine._scheduler.drafter._pool
    assert pool.free == pool.total == 12


def test_a_draft_model_of_another_vocabulary_is_refused(model):
    with pytest.raises(LockstepError, match=r"vocabulary of 400 tokens, the model one of \d+: give"):
        Engine(model, draft_model=tiny_model(vocab_size=400))
