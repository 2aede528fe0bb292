"""What a GGUF file's header says of its model. Imports no PyTorch, as `gguf_header.py` does not."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.config.model import ModelConfig
from lockstep.errors import LockstepError
from lockstep.model.families import FAMILIES, family_of_gguf
from lockstep.model.gguf_header import Header
from lockstep.model.hf_config import validated

_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_positions": "context_length",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
"""Our fields and GGUF's keys, after the architecture's name."""


def gguf_config(header: Header, source: str) -> ModelConfig:
    """What the header says of the model; how rotary frequencies are stretched is in a tensor (`gguf_file.py`)."""
    metadata = header.metadata
    architecture = str(metadata.get("general.architecture"))
    name = family_of_gguf(architecture, source)
    fields: dict[str, Any] = dict(FAMILIES[name].implied) | {"family": name}
    for ours, theirs in _KEYS.items():
        key = f"{architecture}.{theirs}"
        if key in metadata:
            fields[ours] = metadata[key]
    for key in ("norm_eps", "rope_theta"):
        if key in fields:
            fields[key] = _shortest(fields[key])
    fields["tie_embeddings"] = "output.weight" not in header.tensors
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise LockstepError(f"{source}: tensor token_embd.weight is missing; the file is incomplete")
    fields["vocab_size"] = embedding.shape[0]
    fields["bos_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    fields["eos_ids"] = tuple(sorted(eos_ids(metadata)))
    fields["pad_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    if name == "gemma3_text":
        fields |= _gemma3(metadata, fields)
    return validated(fields, source)


def _shortest(value: float) -> float:
    """1e-05 for the float32 nearest to it: what the original config.json said."""
    return float(str(np.float32(value)))


def eos_ids(metadata: dict[str, Any]) -> set[int]:
    """The tokens that end a generation: end of text, of turn and of message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return {metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata}


def _gemma3(metadata: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp has in its code rather than in the file: the 5:1 pattern, the local base, the 27B's scale."""
    layers = fields["num_layers"]
    pattern = metadata.get("gemma3.attention.sliding_window_pattern", 6)
    scale = (fields["hidden_size"] // fields["num_heads"] if layers == 62 else fields["head_dim"]) ** -0.5
    return {
        "embedding_scale": fields["hidden_size"] ** 0.5,
        "attention_scale": scale,
        "rope_theta": metadata.get("gemma3.rope.freq_base", 1e6),
        "rope_theta_local": metadata.get("gemma3.rope.freq_base_swa", 1e4),
        "sliding_window": metadata["gemma3.attention.sliding_window"],
        "layer_windows": tuple((i + 1) % pattern != 0 for i in range(layers)),
    }
