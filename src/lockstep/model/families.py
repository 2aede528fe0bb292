"""The families as tables: how each one names its weights, what its block has, and its architecture in GGUF.

Adding a family is one entry here and one in `tests/model/test_families.py`; docs/adding-a-model-family.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.model import ModelConfig
from lockstep.errors import LockstepError

_HF_OUTER = {"embed": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_HF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_HF_SANDWICH = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_GGUF_OUTER = {"embed": "token_embd", "norm": "output_norm", "output": "output"}
_GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp_post_norm": "post_ffw_norm",
}


@dataclass(frozen=True)
class Family:
    """One row: everything in which a family differs outside ModelConfig's own fields."""

    architecture: str
    """Hugging Face's class, for `architectures` in config.json."""
    gguf: str
    """general.architecture in GGUF."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig that this family fixes."""
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of config.json keys that are left out there."""
    hf_activation_key: str = "hidden_act"
    """The key of config.json that holds the activation."""
    hf_layer: Mapping[str, str] = field(default_factory=lambda: _HF_LAYER)
    """Our module names within a layer to Hugging Face's."""
    gguf_norm_offset: float = 0.0
    """What GGUF has already added to the norm weights."""
    spare_tokens: frozenset[str] = frozenset()
    """Tokens that the tokenizer has beyond the embedding, and text never needs."""


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama", {"qkv_bias": False, "qk_norm": False}),
    "mistral": Family("MistralForCausalLM", "mistral", {"qkv_bias": False, "qk_norm": False}, {"sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", {"qkv_bias": True, "qk_norm": False}, {"max_window_layers": 28}),
    "qwen3": Family(
        "Qwen3ForCausalLM", "qwen3", {"qkv_bias": False, "qk_norm": True}, {"head_dim": 128, "max_window_layers": 28}
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        "gemma3",
        {"qkv_bias": False, "qk_norm": True, "post_norms": True, "norm_offset": 1.0, "activation": "gelu_tanh"},
        {
            "head_dim": 256,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "query_pre_attn_scalar": 256,
            "sliding_window_pattern": 6,
        },
        hf_activation_key="hidden_activation",
        hf_layer={**_HF_LAYER, **_HF_SANDWICH},
        gguf_norm_offset=1.0,
        spare_tokens=frozenset({"<image_soft_token>"}),
    ),
}
"""model_type of config.json -> table. Llama stands for Llama 2, Llama 3 and SmolLM2."""

_COMMON = {"post_norms": False, "norm_offset": 0.0, "activation": "silu", "embedding_scale": 1.0}


def family(name: str, source: str = "model.family") -> Family:
    """The table of a family; LockstepError naming the supported ones for any other."""
    if name not in FAMILIES:
        raise LockstepError(f"{source}: unknown model family {name!r}; supported are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def family_of_gguf(architecture: str, source: str) -> str:
    """Our name of the family with this general.architecture."""
    for name, table in FAMILIES.items():
        if table.gguf == architecture:
            return name
    known = ", ".join(sorted(table.gguf for table in FAMILIES.values()))
    raise LockstepError(f"{source}: unknown GGUF architecture {architecture!r}; supported are {known}")


def check(config: ModelConfig) -> None:
    """Refuse a configuration that its family's exported config.json could not say."""
    table = family(config.family)
    implied = _COMMON | dict(table.implied)
    if config.family == "gemma3_text":
        implied["embedding_scale"] = config.hidden_size**0.5
    for key, value in implied.items():
        found = getattr(config, key)
        if found != value:
            raise LockstepError(
                f"model.{key}: family {config.family} has {value!r}, found {found!r}; "
                f"set it to {value!r} or choose another family"
            )


def hf_names(names: list[str], table: Family) -> dict[str, str]:
    """Our parameter names -> Hugging Face's."""
    return {name: _translate(name, _HF_OUTER, table.hf_layer, "model.layers") for name in names}


def gguf_names(names: list[str]) -> dict[str, str]:
    """Our parameter names -> GGUF's."""
    return {name: _translate(name, _GGUF_OUTER, _GGUF_LAYER, "blk") for name in names}


def _translate(name: str, outer: Mapping[str, str], layer: Mapping[str, str], prefix: str) -> str:
    module, _, leaf = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{outer[module]}.{leaf}"
    _, index, inner = module.split(".", 2)
    return f"{prefix}.{index}.{layer[inner]}.{leaf}"
