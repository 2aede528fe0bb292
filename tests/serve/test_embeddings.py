"""Embeddings against the training forward, and their independence of what they are computed beside."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import LockstepError
from lockstep.ops import Packed
from lockstep.serve import embed
from lockstep.serve.api.embeddings import batches

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


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 12))
def test_batches_cover_everything_within_the_limit(lengths, most):
    parts = list(batches(lengths, most))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(lengths)))
    assert all(part.stop - part.start == 1 or sum(lengths[part]) <= most for part in parts)


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
        ({"input": [9999]}, 400, "9999 is outside the vocabulary"),
        ({"input": "the lazy dog " * 900}, 400, "max_positions = 1024"),
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
