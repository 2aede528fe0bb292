"""Embeddings against the training forward, and their independence of what they are computed beside."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
import torch

from lockstep.errors import LockstepError
from lockstep.ops import Packed
from lockstep.serve import Engine, SamplingParams, embed
from lockstep.serve.params import Embedding
from tests.serve.tiny import page_bytes, tiny_model

TEXTS = ["the quick brown fox", "x", "Grüße aus Köln " * 9, "def f(x):", "the lazy dog " * 30]


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def prompts(model) -> list[list[int]]:
    return [model.tokenizer.encode(text) for text in TEXTS]


@torch.inference_mode()
def states(model, ids: list[int]) -> np.ndarray:
    return model.decoder(model.ops, torch.tensor(ids), Packed.of([len(ids)]), dtype=model.dtype).double().numpy()


def test_pooling_is_of_the_final_hidden_states(model):
    for ids in prompts(model):
        hidden = states(model, ids)
        (last,) = embed(model, [ids], "last", unit=False)
        assert last.tobytes() == hidden[-1].astype(np.float32).tobytes()
        (mean,) = embed(model, [ids], "mean", unit=False)
        assert mean.tobytes() == (sum(hidden) / len(ids)).astype(np.float32).tobytes()
        (unit,) = embed(model, [ids])
        # Each of the D values is rounded once to float32: an error of at most 2**-24 of the length.
        assert abs(np.linalg.norm(unit.astype(np.float64)) - 1) < 1e-6
        assert np.allclose(unit * np.linalg.norm(mean), mean, rtol=1e-6)


def test_a_batch_changes_no_byte(model):
    several = prompts(model)
    for pooling in ("mean", "last"):
        alone = [embed(model, [ids], pooling)[0].tobytes() for ids in several]
        assert [v.tobytes() for v in embed(model, several, pooling)] == alone
        assert [v.tobytes() for v in embed(model, several[::-1], pooling)] == alone[::-1]


@pytest.mark.parametrize(("rows", "pages"), [(1, 40), (7, 6), (64, 40)])
def test_chunks_preemption_and_the_cache_change_no_byte(model, rows, pages):
    """In an engine a prompt is a sequence like others: read in chunks, beside some that decode."""
    engine = Engine(model, kv_memory=pages * page_bytes(model), max_batch_tokens=rows, debug=True)
    several = [list(range(3, 203)), *prompts(model)]
    for pooling in ("mean", "last", "last"):
        expected = [vector.tobytes() for vector in embed(model, several, pooling)]
        engine.add_request([5] * 120, SamplingParams(max_tokens=30, ignore_eos=True), priority=-1)
        assert [vector.tobytes() for vector in engine.embed(several, pooling)] == expected
    assert bool(engine.stats().preemptions) == (pages == 6)


def test_the_last_state_of_a_known_prompt_is_one_row_and_the_mean_is_all(model):
    engine = Engine(model, kv_memory=2**22)
    prompt = list(range(3, 204))

    def computed(pooling: str) -> int:
        before = engine.stats().computed_tokens
        engine.embed([prompt], pooling)
        return engine.stats().computed_tokens - before

    assert [computed(pooling) for pooling in ("mean", "last", "mean")] == [201, 201 - 192, 201]


def test_a_long_text_holds_up_nobody_who_decodes(model):
    engine = Engine(model, kv_memory=2**22, max_batch_tokens=32)
    writing = engine.add_request([5] * 20, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    engine.step()
    reading = engine.add_request([7] * 500, embedding=Embedding())
    steps = []
    while not any(output.request == reading for output in steps[-1:]):
        before = engine.stats().computed_tokens
        steps += engine.step()
        assert engine.stats().computed_tokens - before <= 32
    told = [token for output in steps if output.request == writing for token in output.token_ids]
    assert len(told) >= 500 // 32 - 1


def test_damaged_weights_are_told():
    damaged = tiny_model()
    damaged.decoder.norm.weight.data[3] = float("nan")
    with pytest.raises(LockstepError, match="NaN or infinite: its weights are damaged"):
        Engine(damaged, kv_memory=2**22).embed([[5, 6]])
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
    (scored,) = Engine(damaged, kv_memory=2**22).generate([[5, 6, 7]], scoring)
    assert "its weights are damaged" in scored.error
    with pytest.raises(LockstepError, match="pooling is 'max': give one of mean, last"):
        Engine(damaged, kv_memory=2**22).embed([[5, 6]], "max")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [([[]], "empty"), ([[1], [5000]], "5000 is outside"), ([[1] * 1025], "max_positions")],
)
def test_wrong_prompts(model, wrong, said):
    with pytest.raises(LockstepError, match=said):
        embed(model, wrong)


def test_over_http_in_both_encodings(client, url, model):
    expected = [vector.tolist() for vector in embed(model, prompts(model))]
    # The client asks for base64 by itself.
    got = client.embeddings.create(model="tiny", input=TEXTS)
    assert [item.embedding for item in got.data] == expected
    assert [item.index for item in got.data] == list(range(len(TEXTS)))
    assert got.usage.prompt_tokens == got.usage.total_tokens == sum(map(len, prompts(model)))
    floats = client.embeddings.create(model="tiny", input=prompts(model), encoding_format="float")
    assert [item.embedding for item in floats.data] == expected
    raw = httpx.post(f"{url}/v1/embeddings", json={"model": "tiny", "input": [5, 6], "encoding_format": "base64"})
    vector = np.frombuffer(base64.b64decode(raw.json()["data"][0]["embedding"]), "<f4")
    assert vector.tobytes() == embed(model, [[5, 6]])[0].tobytes()
    last = client.embeddings.create(model="tiny", input="x", extra_body={"pooling": "last", "normalize": False})
    assert last.data[0].embedding == embed(model, [model.tokenizer.encode("x")], "last", unit=False)[0].tolist()


def test_beside_generation(client, model):
    """Other embeddings and completions at the same time change neither."""

    def one(index: int) -> object:
        if index % 2:
            return client.completions.create(model="tiny", prompt="the", seed=1, max_tokens=40).choices[0].text
        return client.embeddings.create(model="tiny", input=TEXTS[index % 5 :]).data[0].embedding

    expected = [one(index) for index in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(6))) == expected


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"input": ""}, 400, "input 0 has no tokens"),
        ({"input": []}, 400, "input"),
        ({"input": [[1], []]}, 400, "input"),
        ({"input": ["a", 3]}, 400, "input"),
        ({"input": [9999]}, 400, "9999 is not in the vocabulary"),
        ({"input": "the lazy dog " * 900}, 400, "maximum context length is 1024 tokens"),
        ({"input": "x", "dimensions": 4}, 400, "dimensions is not offered"),
        ({"input": "x", "encoding_format": "hex"}, 400, "encoding_format"),
        ({"input": "x", "pooling": "max"}, 400, "pooling"),
        ({"input": "x", "model": "y"}, 404, "no model 'y'"),
        ({}, 400, "input is missing"),
    ],
)
def test_wrong_requests(url, body, status, said):
    answer = httpx.post(f"{url}/v1/embeddings", json={"model": "tiny", **body})
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]
