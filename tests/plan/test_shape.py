"""Model shapes: names, config.json, mappings and their parameter counts against published ones."""

import json
from dataclasses import replace

import pytest

from lockstep.errors import LockstepError
from lockstep.plan import ModelShape, model_shape


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3-8b", 8.03),  # Hugging Face model cards
        ("llama3-70b", 70.6),
        ("llama3-405b", 405.9),
        ("mixtral-8x7b", 46.7),
        ("qwen3-30b-a3b", 30.5),
        ("deepseek-v2-lite", 15.7),  # arXiv 2405.04434
        ("deepseek-v3", 671.0),  # arXiv 2412.19437
        ("gpt3-175b", 174.6),  # arXiv 2104.04473 prints 175
        ("smollm2-135m", 0.1345),
    ],
)
def test_parameters(name, billions):
    assert model_shape(name).parameters / 1e9 == pytest.approx(billions, rel=0.002)  # norms are not counted


def test_active_parameters_of_experts():
    assert model_shape("mixtral-8x7b").active_parameters / 1e9 == pytest.approx(12.75, rel=0.01)  # 12.9 with embedding


def test_hugging_face_config(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 500, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = model_shape(tmp_path)
    assert shape == model_shape(tmp_path / "config.json")
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.gated, shape.tied) == (3, 2, 16, True, True)
    assert shape.parameters == 3 * (64 * 16 * 2 * 6 + 3 * 64 * 96) + 64 * 500


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "head_dim": 64, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 129280, "tie_word_embeddings": False,
}  # fmt: skip


def test_latent_attention_from_a_hugging_face_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    shape = model_shape(tmp_path)
    assert replace(shape, name="deepseek-v3") == model_shape("deepseek-v3")
    assert (shape.kv_heads, shape.head_dim, shape.value_dim, shape.latent) == (128, 192, 128, 1536 + 512 + 64)
    # Published: 37 B activated; of these the embedding (0.93 B) multiplies nothing.
    assert shape.active_parameters / 1e9 == pytest.approx(37.0, rel=0.02)


def test_latent_attention_with_a_size_missing(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({key: value for key, value in DEEPSEEK_V3.items() if key not in ("v_head_dim", "model_type")})
    )
    with pytest.raises(LockstepError, match="kv_lora_rank 512 needs v_head_dim"):
        model_shape(file)


def test_hugging_face_config_that_cannot_be_planned(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"hidden_size": 64}))
    with pytest.raises(LockstepError, match="has no num_hidden_layers"):
        model_shape(file)
    file.write_text("{")
    with pytest.raises(LockstepError, match="not JSON"):
        model_shape(file)


def test_mapping_and_mistakes():
    shape = model_shape({"layers": 2, "hidden": 8, "heads": 2, "vocab": 10})
    assert shape == ModelShape("custom", 2, 8, 2, 10)
    with pytest.raises(LockstepError, match="unknown key 'layer': the nearest is 'layers'"):
        model_shape({"layer": 2})
    with pytest.raises(LockstepError, match="heads is 0; it must be a whole number"):
        model_shape({"layers": 2, "hidden": 8, "heads": 0, "vocab": 10})
    with pytest.raises(LockstepError, match="hidden, heads, vocab missing"):
        model_shape({"layers": 2})
    with pytest.raises(LockstepError, match="nearest name is 'llama3-8b'"):
        model_shape("llama3-8")


def test_every_packaged_name_loads():
    from lockstep.plan.named_shape import _table

    assert all(model_shape(name).parameters > 0 for name in _table())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"experts": 3, "experts_per_token": 5, "expert_intermediate": 32}, "with 3 experts it must be 1 to 3"),
        ({"experts": 3, "experts_per_token": 2}, "experts need expert_intermediate"),
        ({"intermediate": "wide"}, "intermediate is 'wide'; it must be a whole number"),
        ({"kv_heads": -2}, "kv_heads is -2"),
        ({"vocab": 10**9}, "vocab is 1000000000; it must be a whole number of at least 1 and at most 16,777,216"),
        ({"heads": 5}, "heads 5 does not divide hidden 64: change one, or give head_dim"),
        ({"dense_layers": 5}, "dense_layers is 5; give at most 4"),
        ({"name": 5}, "name is 5; give a str"),
    ],
)
def test_sizes_of_no_model(sizes, message):
    with pytest.raises(LockstepError, match=message):
        model_shape({"layers": 4, "hidden": 64, "heads": 4, "vocab": 100, **sizes})


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100,
    "intermediate_size": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "gated", "tied", "head_dim"),
    [
        ({}, True, False, 16),
        ({"model_type": "gemma2"}, True, True, 256),  # what transformers takes where the file is silent
        ({"model_type": "qwen3"}, True, False, 128),
        ({"text_config": None}, True, False, 16),
        ({"model_type": "phi3", "hidden_act": "silu", "tie_word_embeddings": False}, True, False, 16),
        ({"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh"}, False, True, 16),
        ({"model_type": "gpt2"}, False, True, 16),
    ],
)
def test_what_a_config_leaves_out(changed, gated, tied, head_dim, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changed))
    shape = model_shape(tmp_path)
    assert (shape.gated, shape.tied, shape.head_dim) == (gated, tied, head_dim)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(LLAMA | {"model_type": 5}), "model_type is 5; give a str"),
        (json.dumps(LLAMA | {"model_type": "mamba"}), "whether the MLP of a model of type 'mamba' has a gate"),
        (json.dumps(LLAMA | {"text_config": [1]}), "must be a JSON object"),
        (json.dumps(LLAMA)[:-1] + ', "hidden_size": 65}', "the key 'hidden_size' stands twice"),
        ("[" * 100_000, "is not JSON"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "is not JSON"),
        (json.dumps(LLAMA | {"n_shared_experts": "2"}), "n_shared_experts is '2'; give a whole number"),
    ],
)
def test_configs_with_mistakes(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LockstepError, match=message):
        model_shape(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers: 4\nlayers: 5\n", "line 2: not valid YAML: the key 'layers' stands here and in line 1"),
        ("layers: 2020-13-45\n", "hidden, heads, vocab missing"),  # text, not the date that YAML 1.1 trips over
        ("layers: " + "9" * 5000, "not valid YAML"),
        ("[" * 2_000, "not valid YAML"),
        ("model: 5\n", "`model` is 5: expected text, or a mapping"),
    ],
)
def test_yaml_files_with_mistakes(text, message, tmp_path):
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(LockstepError, match=message):
        model_shape(tmp_path / "m.yaml")


def test_names_longer_than_a_file_can_have():
    with pytest.raises(LockstepError, match="unknown model 'xxx"):
        model_shape("x" * 5000)


@pytest.mark.parametrize(("name", "text"), [("m.yaml", b"\x8a\xff"), ("m.json", b"\x8a\xff"), ("m.json", b"[1]")])
def test_a_file_that_is_no_model(name, text, tmp_path):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(LockstepError, match=name):
        model_shape(tmp_path / name)
