"""The engine on one compiled program: the bytes of operators one by one, and nothing compiles late."""

from __future__ import annotations

import pytest
import torch

from lockstep.compile import Compiler
from lockstep.serve import Engine, SamplingParams
from tests.serve.test_engine import bits, changed_weights, mixed_requests
from tests.serve.tiny import page_bytes, tiny_model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_mix_gives_the_same_bytes_at_both_levels(dtype):
    model = tiny_model(dtype)
    prompts, params = zip(*mixed_requests(12, model.config.vocab_size), strict=True)
    compiled, eager = (
        Engine(model, level=level, kv_memory=30 * page_bytes(model), max_batch_tokens=48, drafts=2, debug=True)
        for level in ("O2", "O0")
    )
    assert [bits(c) for c in compiled.generate(prompts, params)] == [bits(c) for c in eager.generate(prompts, params)]


def test_after_the_start_no_request_waits_for_a_compile(monkeypatch):
    """200 random lengths, in company and alone."""
    model = tiny_model()
    engine = Engine(model, max_batch_tokens=64)

    def late(*_: object) -> None:
        raise AssertionError("a request waited for a compile")

    monkeypatch.setattr(Compiler, "compile", late)
    prompts, _ = zip(*mixed_requests(200, model.config.vocab_size), strict=True)
    short = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    assert len(engine.generate([p[:60] for p in prompts], short)) == 200


def test_new_weights_reach_the_program():
    model, other = tiny_model(), tiny_model()
    engine, fresh = Engine(model, level="O2"), Engine(other, level="O0")
    prompt, params = [model.tokenizer.encode("the quick")], SamplingParams(temperature=0.0, logprobs=0)
    before = engine.generate(prompt, params)
    state = changed_weights(model)
    engine.update_weights(state)
    fresh.update_weights(state)
    after = engine.generate(prompt, params)
    assert [bits(c) for c in after] == [bits(c) for c in fresh.generate(prompt, params)]
    assert before[0].token_ids != after[0].token_ids
