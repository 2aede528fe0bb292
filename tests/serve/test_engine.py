"""The engine: its interface, and the bits of what it returns."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.bench.batching import Mix
from lockstep.errors import LockstepError
from lockstep.serve import Completion, Engine, PromptTooLong, QueueFull, SamplingParams, drawing, runner, sampler
from tests.serve.tiny import page_bytes, tiny_model


def same_bits(a: list[float], b: torch.Tensor) -> bool:
    """Equal as raw float32 bytes; a must hold float32 values."""
    narrow = np.asarray(a, dtype=np.float32)
    assert narrow.astype(np.float64).tolist() == a, "not float32 values"
    return narrow.tobytes() == b.numpy().tobytes()


def bits(completion: Completion) -> tuple:
    return completion.token_ids, completion.logprobs, completion.prompt_logprobs, completion.text


def mixed_requests(count: int, vocabulary: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 300 tokens, half behind a shared prefix of 150; greedy and sampled, stops and penalties."""
    draw = random.Random(5)
    shared = [draw.randrange(3, vocabulary) for _ in range(150)]
    requests = []
    for i in range(count):
        prompt = [draw.randrange(3, vocabulary) for _ in range(draw.choice([1, 7, 63, 64, 65, 150]))]
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.7, 1.0]), top_p=draw.choice([1.0, 0.8]), top_k=draw.choice([0, 20]),
            frequency_penalty=draw.choice([0.0, 0.5]), repetition_penalty=draw.choice([1.0, 1.2]), seed=i,
            max_tokens=draw.choice([1, 5, 40, 70]), logprobs=draw.choice([0, 3]), ignore_eos=True,
            prompt_logprobs=draw.choice([None, None, 0]), stop=draw.choice([(), (" the",)]),
        )  # fmt: skip
        requests.append((shared + prompt if i % 2 else prompt, params))
    return requests


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_batch_gives_the_bits_of_each_alone_and_of_the_training_forward(dtype):
    model = tiny_model(dtype)
    requests = mixed_requests(16, model.config.vocab_size)
    prompts, params = [r[0] for r in requests], [r[1] for r in requests]
    together = Engine(model, kv_memory=40 * page_bytes(model), max_batch_tokens=100, debug=True)
    batch = together.generate(prompts, params)
    again = together.generate(prompts, params)  # behind a warm cache
    assert any(completion.cached_tokens for completion in again)
    guessed = Engine(model, kv_memory=40 * page_bytes(model), drafts=4, debug=True).generate(prompts, params)
    alone = Engine(model, kv_memory=40 * page_bytes(model), prefix_cache=False, debug=True)
    for prompt, one, mine, warm, fast in zip(prompts, params, batch, again, guessed, strict=True):
        (single,) = alone.generate([prompt], one)
        assert bits(mine) == bits(single) == bits(warm) == bits(fast)
        teacher = model.logprobs(prompt + mine.token_ids)
        assert same_bits(mine.logprobs, teacher[len(prompt) - 1 :])
        if one.prompt_logprobs is not None:
            assert same_bits(mine.prompt_logprobs, teacher[: len(prompt) - 1])


def test_sliding_windows_and_qk_norms_give_the_same_bits(model):
    model = tiny_model(qk_norm=True, sliding_window=70, layer_windows=(True, False), post_norms=True)
    prompts = [[(7 * i + j) % 300 + 3 for j in range(n)] for i, n in enumerate((5, 100, 200))]
    engine = Engine(model, max_batch_tokens=64, kv_memory=20 * page_bytes(model), debug=True)
    for prompt, c in zip(
        prompts, engine.generate(prompts, SamplingParams(max_tokens=40, logprobs=0, seed=1)), strict=True
    ):
        assert same_bits(c.logprobs, model.logprobs(prompt + c.token_ids)[len(prompt) - 1 :])


EXPERTS = {"num_experts": 6, "experts_per_token": 2, "expert_intermediate_size": 32, "shared_experts": 1}
LATENTS = {
    "num_kv_heads": 4, "head_dim": 32, "kv_lora_rank": 48, "q_lora_rank": None, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "rope_interleaved": True,
}  # fmt: skip
MIXTURES = {
    "experts": EXPERTS,
    "experts and latents": {**EXPERTS, **LATENTS, "router_scoring": "sigmoid", "dense_layers": 1},
    "absorbed": {**EXPERTS, **LATENTS, "mla_form": "absorbed"},
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_and_latents_give_the_bits_of_each_alone_and_of_the_training_forward(kind):
    """With guessed tokens, behind a warm cache, and with too few pages for all at once."""
    model = tiny_model(**MIXTURES[kind])
    size = runner.page_bytes(model)
    kept = {"experts and latents": 4 * (32 + 16), "absorbed": 48 + 16}.get(kind)  # elements of a token in a layer
    assert kept is None or size == 2 * kept * 64 * 2
    requests = mixed_requests(8, model.config.vocab_size)
    prompts, params = [r[0] for r in requests], [r[1] for r in requests]
    engine = Engine(model, kv_memory=12 * size, max_batch_tokens=100, drafts=2, debug=True)
    batch, again = engine.generate(prompts, params), engine.generate(prompts, params)
    assert any(completion.cached_tokens for completion in again)
    for prompt, one, mine, warm in zip(prompts, params, batch, again, strict=True):
        (single,) = Engine(model, prefix_cache=False, debug=True).generate([prompt], one)
        assert bits(mine) == bits(single) == bits(warm)
        teacher = model.logprobs(prompt + mine.token_ids)
        assert same_bits(mine.logprobs, teacher[len(prompt) - 1 :])


@pytest.mark.parametrize("budget", [1, 3, 64, 500])
def test_the_chunk_size_changes_nothing(model, budget):
    prompt = [i % 300 + 3 for i in range(200)]
    params = SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1, seed=3)
    (chunked,) = Engine(model, max_batch_tokens=budget).generate([prompt], params)
    (whole,) = Engine(model, max_batch_tokens=1000).generate([prompt], params)
    assert (bits(chunked), chunked.top_logprobs) == (bits(whole), whole.top_logprobs)


def test_preempted_requests_give_the_same_bits(model):
    prompts = [[i + 3] * 100 for i in range(6)]
    params = SamplingParams(max_tokens=90, logprobs=0, seed=2, ignore_eos=True)
    small = Engine(model, kv_memory=9 * page_bytes(model), debug=True)
    outputs = small.generate(prompts, params)
    assert small.stats().preemptions > 0
    assert small.stats().pages_used == 0
    large = Engine(model, kv_memory=100 * page_bytes(model))
    assert list(map(bits, outputs)) == list(map(bits, large.generate(prompts, params)))
    assert large.stats().preemptions == 0


def test_choices_are_those_of_their_seed_and_number(model):
    params = SamplingParams(n=3, seed=11, max_tokens=20)
    choices = Engine(model).generate(["the quick", "def f"], params)
    assert [(c.prompt, c.choice) for c in choices] == [(p, c) for p in range(2) for c in range(3)]
    assert len({c.text for c in choices[:3]}) == 3
    (first,) = Engine(model).generate(["the quick"], SamplingParams(seed=11, max_tokens=20))
    assert first.token_ids == choices[0].token_ids


def test_a_drawn_seed_is_told_and_repeats_the_output(model):
    engine = Engine(model)
    (first,) = engine.generate(["fox"], SamplingParams(max_tokens=20))
    (other,) = engine.generate(["fox"], SamplingParams(max_tokens=20))
    (again,) = engine.generate(["fox"], SamplingParams(max_tokens=20, seed=first.seed))
    assert first.seed != other.seed
    assert again.token_ids == first.token_ids != other.token_ids


def test_the_text_is_the_decoding_of_the_tokens(model):
    for completion in Engine(model).generate(["a", "Köln", "x = "] * 4, SamplingParams(max_tokens=60, ignore_eos=True)):
        assert completion.text == model.tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == "length"


def test_stop_strings_stop_tokens_and_end_tokens(model):
    engine = Engine(model)
    (free,) = engine.generate(["the"], SamplingParams(max_tokens=60, seed=4, ignore_eos=True))
    stop = free.text[8:11]
    (stopped,) = engine.generate(["the"], SamplingParams(max_tokens=60, seed=4, stop=(stop,), ignore_eos=True))
    assert stopped.text == free.text[: free.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    token = free.token_ids[6]
    (by_id,) = engine.generate(["the"], SamplingParams(max_tokens=60, seed=4, stop_token_ids=(token,), ignore_eos=True))
    assert by_id.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", token)
    assert by_id.text == model.tokenizer.decode(by_id.token_ids[:-1])
    end = min(model.tokenizer.eos_ids)
    (ended,) = engine.generate(["the"], SamplingParams(max_tokens=60, logit_bias={end: 100}))
    assert (ended.token_ids, ended.text, ended.finish_reason) == ([end], "", "stop")


def test_cached_tokens_are_the_truth(model):
    engine = Engine(model, debug=True)
    prompt = [i % 300 + 3 for i in range(200)]
    (cold,) = engine.generate([prompt], SamplingParams(max_tokens=3, seed=1))
    before = engine.stats().computed_tokens
    (warm,) = engine.generate([prompt], SamplingParams(max_tokens=3, seed=1))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 192)
    assert engine.stats().computed_tokens - before == 200 - 192 + 2
    engine.clear_cache()
    assert engine.generate([prompt], SamplingParams(max_tokens=3))[0].cached_tokens == 0


def test_a_shared_prefix_is_computed_once(model):
    """32 requests at the same moment, 512 tokens in common: at most 10 % of the others' prompts are computed."""
    prefix = [i % 300 + 3 for i in range(512)]
    engine = Engine(model, debug=True)
    answers = engine.generate([[*prefix, *[i + 3] * 20] for i in range(32)], SamplingParams(max_tokens=1, seed=1))
    assert [c.cached_tokens for c in answers] == [0] + [512] * 31
    assert engine.stats().computed_tokens - 532 == 31 * 20 <= 0.1 * 31 * 532


def test_a_known_prefix_gives_the_first_token_three_times_sooner(model):
    """512 tokens in common, one request after the other. Prefixes are shared under the same salt alone. Processor time:
    other processes must not fail this."""
    engine = Engine(model)

    def first(salt: str) -> tuple[int, float]:
        steps, begun = engine.stats().steps, time.thread_time()
        engine.add_request([i % 300 + 3 for i in range(532)], SamplingParams(max_tokens=1), salt=salt)
        while engine.has_work():
            engine.step()
        return engine.stats().steps - steps, time.thread_time() - begun

    first("known")
    pairs = [(first(str(i)), first("known")) for i in range(16)]
    assert {(new[0], known[0]) for new, known in pairs} == {(5, 1)}
    assert statistics.median(new[1] / known[1] for new, known in pairs) >= 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_request_mix_gives_the_bits_of_each_alone_and_of_the_training_forward():
    """64 requests, prompts of 8 to 1,500 tokens, outputs of 4 to 256, half behind the same 512 tokens, at 1 and at 32
    clients: `pytest -m slow tests/serve/test_engine.py`."""
    model = tiny_model(max_positions=2048)
    work = Mix().draw("mix", model.config.vocab_size)
    prompts = [prompt for prompt, _ in work]
    params = [
        SamplingParams(max_tokens=tokens, temperature=i % 3 / 2, seed=i, logprobs=0, ignore_eos=True)
        for i, (_, tokens) in enumerate(work)
    ]
    alone = Engine(model, prefix_cache=False)
    right = [bits(alone.generate([prompt], one)[0]) for prompt, one in zip(prompts, params, strict=True)]
    for prompt, (tokens, logprobs, *_) in zip(prompts, right, strict=True):
        assert same_bits(logprobs, model.logprobs(prompt + tokens)[len(prompt) - 1 :])
    for clients in (1, 32):
        engine = Engine(model, max_running=clients, debug=True)
        assert [bits(one) for one in engine.generate(prompts, params)] == right


def test_abort_frees_the_pages_at_once(model):
    engine = Engine(model, prefix_cache=False, debug=True)
    kept = engine.add_request([5] * 10, SamplingParams(max_tokens=5, ignore_eos=True))
    gone = engine.add_request([6] * 300, SamplingParams(max_tokens=500, n=2, ignore_eos=True))
    for _ in range(3):
        engine.step()
    used = engine.stats().pages_used
    outputs = engine.abort(gone)
    assert [o.finish_reason for o in outputs] == ["abort", "abort"]
    assert engine.stats().pages_used == 1 < used
    assert engine.abort(gone) == []
    ended = []
    while engine.has_work():
        ended += engine.step()
    assert {o.request for o in ended} == {kept}
    assert engine.stats().pages_used == 0


def test_timeout_ends_a_request(model):
    engine = Engine(model)
    engine.add_request([5] * 10, SamplingParams(max_tokens=900, ignore_eos=True), timeout=0.2)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert outputs[-1].finish_reason == "timeout"
    assert sum(len(o.token_ids) for o in outputs) < 900


def test_max_tokens_zero_scores_the_prompt(model):
    prompt = [5, 6, 7, 8]
    (scored,) = Engine(model).generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert scored.token_ids == []
    assert same_bits(scored.prompt_logprobs, model.logprobs(prompt))


def test_a_wrong_prompt_of_many_is_named(model):
    with pytest.raises(LockstepError, match="prompt 2: token id 9999 is not in the vocabulary"):
        Engine(model).generate([[5], [9999]])


def test_a_prompt_that_takes_every_page_is_scored(model):
    """It needs no room for a next token."""
    prompt, engine = [7] * 128, Engine(model, kv_memory=2 * page_bytes(model), debug=True)
    request = engine.add_request(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))
    told = [output for _ in range(5) for output in engine.step()]
    assert [(output.request, output.finish_reason) for output in told] == [(request, "length")]
    assert same_bits([score.logprob for score in told[0].prompt_scores], model.logprobs(prompt))


def test_top_logprobs_are_the_largest_of_the_row(model):
    (c,) = Engine(model).generate([[5, 6, 7]], SamplingParams(max_tokens=1, logprobs=5, seed=1))
    row = model.ops.log_softmax(model.logits([5, 6, 7])[-1:])[0]
    values, ids = row.sort(descending=True, stable=True)
    assert list(c.top_logprobs[0]) == ids[:5].tolist()
    assert same_bits(list(c.top_logprobs[0].values()), values[:5])


def test_what_does_not_fit_is_refused(model):
    engine = Engine(model, kv_memory=2 * page_bytes(model), max_queue=3)
    too_long = "context length is 128 tokens, but the prompt has 120 and max_tokens asks for 9"
    with pytest.raises(PromptTooLong, match=too_long):
        engine.add_request([5] * 120, SamplingParams(max_tokens=9))
    with pytest.raises(LockstepError, match="token id 99999"):
        engine.add_request([99999])
    with pytest.raises(LockstepError, match="no tokens"):
        engine.add_request([])
    engine.add_request([5] * 120, SamplingParams(max_tokens=8))
    with pytest.raises(QueueFull, match="try again"):
        engine.add_request([5], SamplingParams(n=3))
    with pytest.raises(LockstepError, match="a few pages"):
        Engine(model, kv_memory=100)
    with pytest.raises(LockstepError, match="list of prompts"):
        engine.generate([1, 2, 3])


def test_a_model_without_a_tokenizer_serves_token_ids(model):
    from lockstep.model.model import Model

    bare = Model(model.decoder, None, model.ops, model.dtype)
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    (ours,) = Engine(bare).generate([[5, 6]], params)
    assert (ours.token_ids, ours.text) == (Engine(model).generate([[5, 6]], params)[0].token_ids, "")


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_damaged_weights_end_the_request_with_a_reason(value):
    model = tiny_model()
    model.decoder.head_weight.data[7, 3] = float(value)
    engine = Engine(model)
    engine.add_request([5, 6])
    (output,) = engine.step()
    assert output.finish_reason == "abort"
    assert "NaN or infinite" in output.error


def test_a_draw_that_fails_ends_its_request_alone(model, monkeypatch, caplog):
    right = Engine(model).generate([[5, 6]], SamplingParams(seed=1))[0].token_ids

    def sample(row, params, *rest):
        if params.top_k == 7:
            raise ZeroDivisionError("by zero")
        return sampler.sample(row, params, *rest)

    monkeypatch.setattr(drawing, "sample", sample)
    engine = Engine(model, debug=True)
    wrong = engine.add_request([5, 6], SamplingParams(top_k=7))
    engine.add_request([5, 6], SamplingParams(seed=1))
    outputs = [output for _ in range(40) for output in engine.step()]
    (failed,) = [output for output in outputs if output.request == wrong]
    assert (failed.finish_reason, failed.error) == ("abort", "this is a bug: ZeroDivisionError: by zero")
    assert "top_k=7" in caplog.text
    assert [token for output in outputs if output.request != wrong for token in output.token_ids] == right


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guessing_gives_the_same_bits_in_fewer_steps(model, temperature):
    phrase = model.tokenizer.encode("the quick brown fox jumps")
    params = SamplingParams(
        max_tokens=60, temperature=temperature, seed=1, logprobs=1, ignore_eos=True, stop=("never",),
        logit_bias=dict.fromkeys(phrase, 12.0),
    )  # fmt: skip
    plain, guessing = Engine(model), Engine(model, drafts=4, debug=True)
    a, b = plain.generate([phrase * 3], params), guessing.generate([phrase * 3], params)
    assert bits(a[0]) == bits(b[0])
    assert a[0].top_logprobs == b[0].top_logprobs
    assert guessing.stats().steps < plain.stats().steps


def test_a_choice_ends_in_the_middle_of_right_guesses(model):
    token = model.tokenizer.encode("e")[0]
    params = SamplingParams(max_tokens=30, temperature=0.0, logit_bias={token: 100.0}, stop=("eeeee",), logprobs=0)
    (a,) = Engine(model).generate([[token] * 8], params)
    (b,) = Engine(model, drafts=8, debug=True).generate([[token] * 8], params)
    assert bits(a) == bits(b)
    assert (b.text, b.finish_reason, len(b.token_ids)) == ("", "stop", 5)


def changed_weights(model, factor: float = 1.5) -> dict[str, torch.Tensor]:
    return {name: p.detach() * factor for name, p in model.decoder.named_parameters()}


def test_new_weights_give_the_bits_of_a_fresh_start():
    served, fresh = tiny_model(), tiny_model()
    prompt, params = [i % 300 + 3 for i in range(200)], SamplingParams(max_tokens=20, seed=1, logprobs=0)
    engine = Engine(served, debug=True)
    (before,) = engine.generate([prompt], params)
    engine.update_weights(changed_weights(served))
    for (_, parameter), value in zip(fresh.decoder.named_parameters(), changed_weights(fresh).values(), strict=True):
        parameter.data = value
    (after,) = engine.generate([prompt], params)
    assert after.cached_tokens == 0
    assert bits(after) == bits(Engine(fresh).generate([prompt], params)[0]) != bits(before)


def test_new_weights_in_mid_request_go_on_with_its_tokens():
    served = tiny_model()
    engine = Engine(served, debug=True)
    params = SamplingParams(max_tokens=20, seed=1, logprobs=0, ignore_eos=True)
    engine.add_request([5] * 70, params)
    outputs = [o for _ in range(6) for o in engine.step()]
    engine.update_weights(changed_weights(served))
    while engine.has_work():
        outputs += engine.step()
    tokens = [t for o in outputs for t in o.token_ids]
    later = served.logprobs([5] * 70 + tokens)[70 + 6 - 1 :]
    assert same_bits([s.logprob for o in outputs for s in o.scores][6:], later)


def test_new_weights_that_do_not_fit_change_nothing(model):
    engine = Engine(model)
    state = changed_weights(model)
    (before,) = engine.generate([[5, 6]], SamplingParams(seed=1))
    for name, wrong, said in (
        ("norm.weight", None, "norm.weight is missing"),
        ("more.weight", torch.zeros(1), "more.weight is not a parameter"),
        ("norm.weight", torch.zeros(3), r"norm.weight is \[3\], the model has \[64\]"),
    ):
        bad = {k: v for k, v in {**state, name: wrong}.items() if v is not None}
        with pytest.raises(LockstepError, match=said):
            engine.update_weights(bad)
    assert engine.generate([[5, 6]], SamplingParams(seed=1))[0].token_ids == before.token_ids


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": "smollm2-135m"}, r"model is 'smollm2-135m': give .* lockstep.load\('smollm2-135m'\)"),
        ({"draft_model": Path("small")}, r"draft_model is 'small': give .* lockstep.load\('small'\)"),
        ({"kv_memory": "2GiB"}, "kv_memory, in bytes, is '2GiB'; give a whole number of at least 1"),
        ({"max_batch_tokens": 0}, "max_batch_tokens is 0; give a whole number of at least 1"),
        ({"max_queue": -1}, "max_queue is -1; give a whole number of at least 0"),
        ({"drafts": 1.5}, "drafts is 1.5; give a whole number of at least 0"),
    ],
)
def test_what_an_engine_cannot_be_made_of_is_told(given, told):
    with pytest.raises(LockstepError, match=told):
        Engine(**{"model": tiny_model(), **given})
