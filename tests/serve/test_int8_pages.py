"""Keys and values in eight bits: how far off they are, what they take, where they are refused."""

from __future__ import annotations

import pytest
import torch

from lockstep.errors import LockstepError
from lockstep.model.model import Model
from lockstep.model.pages import make_pages
from lockstep.ops import PAGE, Paged, operators
from lockstep.ops.int8_pages import read
from lockstep.serve import Engine, SamplingParams
from lockstep.serve.runner import page_bytes
from tests.serve.tiny import tiny_model


@pytest.fixture(scope="module")
def fast():
    model = tiny_model(torch.float32)
    return Model(model.decoder, model.tokenizer, operators("fast"), torch.float32)


def zeros(shape, dtype):
    return torch.zeros(shape, dtype=dtype)


def test_what_is_read_back_is_wrong_by_half_a_step_at_most(fast):
    (pages,) = make_pages(fast.config, "fast", 3, torch.int8, zeros)[:1]
    heads, dim, length = fast.config.num_kv_heads, fast.config.head_dim, PAGE + 9
    k, v = torch.randn(length, heads, dim) * 7, torch.randn(length, heads, dim)
    k[3, 1], v[5] = 0.0, 0.0
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    for a, b in ((0, 20), (20, length)):  # in two parts, as a prompt in chunks
        batch = Paged(torch.arange(a, b, dtype=torch.int32), torch.tensor([0, b - a], dtype=torch.int32), table)
        fast.ops.write_kv(k[a:b], v[a:b], pages, batch)
    for x, back in zip((k, v), read(pages, table[0].long(), length, torch.float32), strict=True):
        step = x.abs().amax(-1, keepdim=True) / 127
        assert ((back - x).abs() <= step / 2 * 1.001).all()  # and float32's own rounding
    assert not read(pages, table[0].long(), length, torch.float32)[1][5].any()


def test_the_engine_stays_close_on_a_fraction_of_the_memory(fast):
    assert page_bytes(fast) / page_bytes(fast, torch.int8) == 4 * 16 / (16 + 4)  # head_dim 16: a scale is 4 bytes
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    prompt = fast.tokenizer.encode("the quick brown fox jumps over the lazy dog") * 6
    (exact,) = Engine(fast, debug=True).generate([prompt], params)
    (close,) = Engine(fast, kv_dtype="int8", max_batch_tokens=32, debug=True).generate([prompt], params)
    pairs = zip(exact.prompt_logprobs[1:], close.prompt_logprobs[1:], strict=True)
    off = [abs(a - b) for a, b in pairs]
    # Eight bits leave a relative error of about 1/254 in keys and values; logits of this model reach 20.
    assert 0 < sum(off) / len(off) < 0.05
    assert max(off) < 1.0


def test_it_is_refused_where_it_would_break_the_contract(fast):
    with pytest.raises(LockstepError, match=r"kv_dtype is int8.*breaks the bit contract.*--numerics fast"):
        Engine(tiny_model(), kv_dtype="int8")
