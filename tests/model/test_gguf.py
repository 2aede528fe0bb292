"""GGUF files written with the `gguf` package: every quant type, the conversions to undo, the tokenizer, damage."""

import json

import gguf
import numpy as np
import pytest
import torch
import transformers as t
from gguf import GGMLQuantizationType as Kind

from lockstep.config.model import RopeScaling
from lockstep.errors import LockstepError
from lockstep.model import load, train_bpe
from lockstep.model.families import gguf_names
from lockstep.model.gguf_header import read_header
from lockstep.model.rope import frequencies
from lockstep.model.weights.gguf_file import QUANT_TYPES
from lockstep.model.weights.gguf_tokenizer import gguf_tokenizer
from tests.model.tiny import SIZES, same_bytes, tiny

WRITTEN_BY_PACKAGE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""The K types can be read by the package, not written: their bytes are drawn at random."""

_KV = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}


def write(path, oracle, hf_directory, kind=Kind.F32, extra=None, tensors=None):
    """A transformers model as GGUF, by the rules of llama.cpp's converter. Returns our names -> written values."""
    config = oracle.config
    arch = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), arch)
    for key, theirs in _KV.items():
        writer.add_uint32(f"{arch}.{key}", getattr(config, theirs))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_uint32(f"{arch}.attention.key_length", head_dim)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_float32(f"{arch}.rope.freq_base", rope.get("full_attention", rope)["rope_theta"])
    for key, value in (extra or {}).items():
        writer.add_uint32(key, value)
    values = {}
    ours = load(hf_directory, dtype="float32").decoder
    names = gguf_names([name for name, _ in ours.named_parameters()])
    for name, parameter in ours.named_parameters():
        value = parameter.detach().numpy()
        values[name] = value = _stored(writer, names[name], value, config, head_dim, kind)
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _stored(writer, name, value, config, head_dim, kind):
    """Add one tensor; return what a reader must see: quantised and dequantised by the package itself."""
    permuted = config.model_type == "llama" and name.endswith(("attn_q.weight", "attn_k.weight"))
    if permuted:  # llama.cpp's converter: the two halves of a head's rows are interleaved
        value = value.reshape(-1, 2, head_dim // 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        value = value + 1
    kind = Kind.F32 if value.ndim == 1 else kind
    if kind.name in WRITTEN_BY_PACKAGE:
        raw = gguf.quantize(np.ascontiguousarray(value), kind)
    else:
        raw = _random_blocks(value.shape, kind, len(name))
    writer.add_tensor(name, raw, raw_dtype=kind)
    seen = gguf.dequantize(raw, kind)
    if permuted:
        seen = seen.reshape(-1, head_dim // 2, 2, seen.shape[1]).swapaxes(1, 2).reshape(seen.shape)
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        seen = seen - 1
    return seen


def _random_blocks(shape, kind, seed):
    """Random bytes whose float16 scales are finite: exponents are kept below the largest one."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(seed).integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    scales = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (size - 2,)}[kind.name]
    for start in scales:
        raw[..., start + 1] &= 0x1F
    return raw.reshape(shape[0], -1)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose rows are whole K blocks (256)."""
    torch.manual_seed(0)
    config = t.LlamaConfig(**{**SIZES, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1,
                              "head_dim": 64, "vocab_size": 70})  # fmt: skip
    oracle = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    directory = tmp_path_factory.mktemp("wide")
    oracle.save_pretrained(directory)
    return oracle, directory


@pytest.mark.parametrize("name", QUANT_TYPES)
def test_every_quant_type(name, wide, tmp_path):
    oracle, directory = wide
    file = tmp_path / "model.gguf"
    written = write(file, oracle, directory, Kind[name])
    model = load(file, dtype="float32")
    for ours, parameter in model.decoder.named_parameters():
        assert same_bytes(parameter.detach(), torch.from_numpy(np.ascontiguousarray(written[ours]))), ours
    rounded = load(file, dtype="bfloat16")
    for (_, a), (_, b) in zip(rounded.decoder.named_parameters(), model.decoder.named_parameters(), strict=True):
        assert same_bytes(a.detach(), b.detach().bfloat16())


@pytest.mark.parametrize("name", ["smollm2", "mistral-full", "qwen2", "qwen3", "gemma3"])
def test_families_through_gguf_equal_the_directory(name, tmp_path):
    """Permuted rows, shifted norms, tied heads and biases come back as they were, bit for bit
    (Gemma's norms up to the rounding of adding 1 and taking it away)."""
    oracle = tiny(name)
    oracle.save_pretrained(tmp_path / "hf")
    extra = {"gemma3.attention.sliding_window": 7} if name == "gemma3" else {}
    write(tmp_path / "model.gguf", oracle, tmp_path / "hf", extra=extra)
    ours, theirs = load(tmp_path / "model.gguf", dtype="float32"), load(tmp_path / "hf", dtype="float32")
    ids = list(range(60))
    if name == "gemma3":
        # head_dim 32 against the test model's query_pre_attn_scalar 24: GGUF has no key for it.
        assert ours.config == theirs.config.model_copy(update={"attention_scale": 32**-0.5, "bos_id": None,
                                                                "eos_ids": (), "pad_id": None})  # fmt: skip
        for a, b in zip(ours.decoder.parameters(), theirs.decoder.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=2**-23, rtol=0)  # half an ulp of 1 + w, twice
    else:
        assert same_bytes(ours.logits(ids), theirs.logits(ids))


def test_llama3_scaling_is_found_from_the_factors(tmp_path):
    """GGUF holds what each frequency is divided by. Llama 3's own parameters are found; others are refused."""
    oracle = tiny("llama3")
    oracle.save_pretrained(tmp_path / "hf")
    plain, scaling = frequencies(32, 5e5, None), RopeScaling(kind="llama3", factor=32.0)
    factors = {"rope_freqs.weight": (plain / frequencies(32, 5e5, scaling)).numpy()}
    write(tmp_path / "model.gguf", oracle, tmp_path / "hf", tensors=factors)
    assert load(tmp_path / "model.gguf").config.rope_scaling == scaling

    factors["rope_freqs.weight"] = factors["rope_freqs.weight"] * 1.5
    write(tmp_path / "other.gguf", oracle, tmp_path / "hf", tensors=factors)
    with pytest.raises(LockstepError, match=r"rope_freqs.weight is not Llama 3's"):
        load(tmp_path / "other.gguf")


@pytest.mark.parametrize("split", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_tokenizer_of_the_metadata(split):
    trained = train_bpe(iter(["it's 2024: the quick brown fox isn't there   \n\n" * 20]), 300)
    vocab = trained.backend.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [" ".join(pair) for pair in json.loads(trained.backend.to_str())["model"]["merges"]]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
    }
    tokenizer = gguf_tokenizer(metadata, "f")
    text = "the fox isn't 20 <|im_end|>ä"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special=False) == ("<|im_start|>" if split == "llama-bpe" else "") + text
    assert (ids[0] == 1) == (split == "llama-bpe")
    assert tokenizer.encode(text, add_special=False) == ids[split == "llama-bpe" :]
    assert tokenizer.eos_ids == {0, 2}
    assert 2 in ids
    words = [word for word, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str("a 1234")]
    numbers = {"gpt-2": ["Ġ1234"], "smollm": ["Ġ", "1", "2", "3", "4"], "llama-bpe": ["Ġ", "123", "4"],
               "qwen2": ["Ġ", "1", "2", "3", "4"]}[split]  # fmt: skip
    assert words == ["a", *numbers]
    with pytest.raises(LockstepError, match="'llama'"):
        gguf_tokenizer({**metadata, "tokenizer.ggml.model": "llama"}, "f")
    with pytest.raises(LockstepError, match=r"'bert'.*smollm"):
        gguf_tokenizer({**metadata, "tokenizer.ggml.pre": "bert"}, "f")


def test_damaged_files_are_named(wide, tmp_path):
    oracle, directory = wide
    file = tmp_path / "model.gguf"
    write(file, oracle, directory)
    whole = file.read_bytes()
    for kept, reason in (
        (3, "no GGUF"),
        (40, "header"),
        (2000, "header|ends within"),
        (len(whole) - 4000, "ends within"),
    ):
        (tmp_path / "cut.gguf").write_bytes(whole[:kept])
        with pytest.raises(LockstepError, match=f"cut.gguf.*({reason})"):
            load(tmp_path / "cut.gguf")
    (tmp_path / "arch.gguf").write_bytes(whole.replace(b"llama", b"mamba"))
    with pytest.raises(LockstepError, match=r"'mamba'.*gemma3, llama"):
        load(tmp_path / "arch.gguf")


def test_header_equals_the_packages_reader(wide, tmp_path):
    oracle, directory = wide
    file = tmp_path / "model.gguf"
    write(file, oracle, directory)
    header, reader = read_header(file), gguf.GGUFReader(str(file))
    assert {n: (i.shape, i.kind, i.offset) for n, i in header.tensors.items()} == {
        x.name: (tuple(int(n) for n in x.shape)[::-1], int(x.tensor_type), int(x.data_offset)) for x in reader.tensors
    }
    metadata = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert header.metadata == metadata


def test_unsupported_quant_type_is_named(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    for key, value in {"embedding_length": 256, "feed_forward_length": 256, "block_count": 1, "context_length": 8,
                       "attention.head_count": 4}.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 84), dtype=np.uint8), raw_dtype=Kind.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(LockstepError, match=r"token_embd.weight is of type Q2_K.*Q4_K"):
        load(tmp_path / "m.gguf")
