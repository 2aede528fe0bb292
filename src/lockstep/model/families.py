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
    "mlp.router": "mlp.gate",
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    "mlp.experts.*.gate": "mlp.experts.*.gate_proj",
    "mlp.experts.*.up": "mlp.experts.*.up_proj",
    "mlp.experts.*.down": "mlp.experts.*.down_proj",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
_HF_MIXTRAL = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.*.gate": "block_sparse_moe.experts.*.w1",
    "mlp.experts.*.up": "block_sparse_moe.experts.*.w3",
    "mlp.experts.*.down": "block_sparse_moe.experts.*.w2",
}
_HF_LATENT = {
    "attn.q_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_layernorm",
    "attn.q_b": "self_attn.q_b_proj",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_norm": "self_attn.kv_a_layernorm",
    "attn.kv_b": "self_attn.kv_b_proj",
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
    gguf: str | None
    """general.architecture in GGUF; None: not read from there."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig that this family fixes."""
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of config.json keys that are left out there."""
    hf_activation_key: str = "hidden_act"
    """The key of config.json that holds the activation."""
    hf_layer: Mapping[str, str] = field(default_factory=lambda: _HF_LAYER)
    """Our module names (or full parameter names) within a layer to Hugging Face's; * stands for an expert's number."""
    hf_keys: Mapping[str, str] = field(default_factory=dict)
    """Fields of ModelConfig that are one key of this family's config.json, besides those of every family."""
    hf_aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys that some version of transformers writes, and what they are called elsewhere."""
    gguf_norm_offset: float = 0.0
    """What GGUF has already added to the norm weights."""
    spare_tokens: frozenset[str] = frozenset()
    """Tokens that the tokenizer has beyond the embedding, and text never needs."""


_EXPERT_KEYS = {"experts_per_token": "num_experts_per_tok", "router_aux_loss": "router_aux_loss_coef"}
_DEEPSEEK_KEYS = {
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_intermediate_size": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
    "router_groups": "n_group",
    "router_top_groups": "topk_group",
    "router_scale": "routed_scaling_factor",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_DEEPSEEK_DEFAULTS = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
}  # fmt: skip

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
    "gemma2": Family(
        "Gemma2ForCausalLM",
        None,
        {"qkv_bias": False, "qk_norm": False, "post_norms": True, "norm_offset": 1.0, "activation": "gelu_tanh"},
        {
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        hf_activation_key="hidden_activation",
        hf_layer={**_HF_LAYER, **_HF_SANDWICH},
        hf_keys={"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        None,
        {"qkv_bias": False, "qk_norm": False, "router_scoring": "softmax", "router_normalize": True},
        {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001, "rope_theta": 1e6},
        hf_layer={**_HF_LAYER, **_HF_MIXTRAL},
        hf_keys={"num_experts": "num_local_experts", **_EXPERT_KEYS},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        None,
        {"qkv_bias": False, "qk_norm": True, "router_scoring": "softmax"},
        {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "rms_norm_eps": 1e-6,
            "router_aux_loss_coef": 0.001,
            "norm_topk_prob": False,
            "num_key_value_heads": 4,
        },
        hf_keys={
            "num_experts": "num_experts",
            "expert_intermediate_size": "moe_intermediate_size",
            "router_normalize": "norm_topk_prob",
            **_EXPERT_KEYS,
        },
        hf_aliases={"num_local_experts": "num_experts"},
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        None,
        {
            "qkv_bias": False,
            "qk_norm": False,
            "router_scoring": "softmax",
            "router_normalize": False,
            "rope_interleaved": True,
        },
        {
            **_DEEPSEEK_DEFAULTS,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
        },
        hf_layer={**_HF_LAYER, **_HF_LATENT},
        hf_keys=_DEEPSEEK_KEYS,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        None,
        {"qkv_bias": False, "qk_norm": False, "router_scoring": "sigmoid"},
        {
            **_DEEPSEEK_DEFAULTS,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "rope_interleave": True,
        },
        hf_layer={**_HF_LAYER, **_HF_LATENT},
        hf_keys={**_DEEPSEEK_KEYS, "router_normalize": "norm_topk_prob", "rope_interleaved": "rope_interleave"},
    ),
}
"""model_type of config.json -> table. Llama stands for Llama 2, Llama 3 and SmolLM2."""

_COMMON = {"post_norms": False, "norm_offset": 0.0, "activation": "silu", "embedding_scale": 1.0}
_SPECIAL = (
    "num_experts", "experts_per_token", "shared_experts", "dense_layers", "router_scoring", "router_normalize",
    "router_groups", "router_top_groups", "router_scale", "router_aux_loss", "kv_lora_rank", "q_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleaved", "attention_softcap", "logit_softcap",
)  # fmt: skip
"""Fields that have their default where a family has no key for them."""


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
    known = ", ".join(sorted(table.gguf for table in FAMILIES.values() if table.gguf is not None))
    raise LockstepError(f"{source}: unknown GGUF architecture {architecture!r}; supported are {known}")


def check(config: ModelConfig) -> None:
    """Refuse a configuration that its family's exported config.json could not say."""
    table = family(config.family)
    special = {key: ModelConfig.model_fields[key].default for key in _SPECIAL if key not in table.hf_keys}
    implied = _COMMON | special | dict(table.implied)
    if config.family == "qwen3_moe":
        del implied["dense_layers"]  # said by mlp_only_layers
    if config.family == "mixtral":
        implied["expert_intermediate_size"] = config.intermediate_size
    if config.family.startswith("gemma"):
        implied["embedding_scale"] = config.hidden_size**0.5
    for key, value in implied.items():
        found = getattr(config, key)
        if found != value:
            raise LockstepError(
                f"model.{key}: family {config.family} has {value!r}, found {found!r}; "
                f"set it to {value!r} or choose another family"
            )
    if "num_experts" in table.hf_keys and not config.num_experts:
        raise LockstepError(f"model.num_experts is 0, but family {config.family} has experts: give their number")


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
    if f"{inner}.{leaf}" in layer:
        return f"{prefix}.{index}.{layer[f'{inner}.{leaf}']}"
    number = next((part for part in inner.split(".") if part.isdigit()), "")
    theirs = layer[inner.replace(f".{number}.", ".*.") if number else inner].replace("*", number)
    return f"{prefix}.{index}.{theirs}.{leaf}"
