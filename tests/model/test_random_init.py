"""Random initialisation and the rotary table: pure functions of their keys."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lockstep.config.model import ModelConfig
from lockstep.model import random_decoder
from lockstep.model.rope import RopeTable, build, frequencies
from tests.model.tiny import same_bytes

CONFIG = ModelConfig(vocab_size=500, hidden_size=128, intermediate_size=192, num_layers=4, num_heads=4, num_kv_heads=2)


def weights(config, seed):
    return {name: p.detach() for name, p in random_decoder(config, seed).named_parameters()}


def test_same_seed_same_bits_other_seed_other_bits():
    a, b, c = weights(CONFIG, 7), weights(CONFIG, 7), weights(CONFIG, 8)
    assert all(p.dtype == torch.float32 for p in a.values())
    assert all(same_bytes(a[name], b[name]) for name in a)
    assert all(not torch.equal(a[name], c[name]) for name in a if a[name].ndim == 2)


def test_a_tensor_does_not_depend_on_the_others():
    deeper = weights(CONFIG.model_copy(update={"num_layers": 6, "tie_embeddings": True}), 7)
    a = weights(CONFIG, 7)
    names = ["embed.weight", "layers.0.attn.q.weight", "layers.3.mlp.up.weight"]
    assert all(same_bytes(a[name], deeper[name]) for name in names)


def test_scales_and_identities():
    drawn = weights(CONFIG.model_copy(update={"qkv_bias": True, "norm_offset": 1.0}), 0)
    # 1 % and more: the standard deviation of n = 24576 normal draws has a relative error of 1 / sqrt(2 n) = 0.5 %.
    assert drawn["layers.0.mlp.up.weight"].std() == pytest.approx(0.02, rel=0.02)
    assert drawn["layers.0.mlp.down.weight"].std() == pytest.approx(0.02 / 8**0.5, rel=0.02)
    assert not drawn["layers.0.attn.q.bias"].any()
    assert not drawn["norm.weight"].any(), "offset 1: a weight of 0 is the identity"


def test_rotary_entry_does_not_depend_on_the_tables_length():
    f = frequencies(64, 10000.0, None)
    long = build(f, 5000)
    for length in (1, 3, 1023, 1025, 4999):
        assert same_bytes(build(f, length), long[:length].clone())
    table = RopeTable(64, 10000.0, None, 131072)
    short = table.rows(10, torch.device("cpu")).clone()
    grown = table.rows(3000, torch.device("cpu"))
    assert len(short) < 131072
    assert len(grown) >= 3000
    assert same_bytes(short, grown[: len(short)].clone())


def test_rotary_table_agrees_with_transformers():
    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=128, num_attention_heads=2, rope_theta=100000.0))
    cos, sin = theirs(torch.zeros(1), torch.arange(8192)[None])
    ours = build(frequencies(64, 100000.0, None), 8192)
    # The angles are the same float32 numbers; torch's float32 cosine is within 1 ulp of 1 (2 ** -23) of the exact one.
    torch.testing.assert_close(ours[..., 0], cos[0, :, :32], atol=2**-23, rtol=0)
    torch.testing.assert_close(ours[..., 1], sin[0, :, :32], atol=2**-23, rtol=0)
