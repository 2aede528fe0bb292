"""Model shapes: names, config.json, mappings and their parameter counts against published ones."""

import json

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


def test_hugging_face_config_that_cannot_be_planned(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"kv_lora_rank": 512}))
    with pytest.raises(LockstepError, match="latent attention"):
        model_shape(file)
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
    from lockstep.plan.shape import _table

    assert all(model_shape(name).parameters > 0 for name in _table())
