"""Tiny random models of every family, made by `transformers`: the tests' oracle."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 1.0,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip

CONFIGS: dict[str, Any] = {
    "llama2": lambda: t.LlamaConfig(**SIZES),
    "llama3": lambda: t.LlamaConfig(**SIZES, head_dim=32, rope_theta=500000.0, rope_scaling=dict(LLAMA3)),
    "llama-linear": lambda: t.LlamaConfig(**SIZES, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "smollm2": lambda: t.LlamaConfig(**SIZES, tie_word_embeddings=True, rope_theta=100000.0),
    "mistral": lambda: t.MistralConfig(**SIZES, sliding_window=7),
    "mistral-full": lambda: t.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: t.Qwen2Config(**SIZES, rope_theta=1e6),
    "qwen2-window": lambda: t.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": lambda: t.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "gemma2": lambda: t.Gemma2Config(
        **SIZES,
        head_dim=32,
        sliding_window=7,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: t.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 7}, head_dim=32, sliding_window=7, query_pre_attn_scalar=24
    ),
    "yarn": lambda: t.Qwen2Config(
        **SIZES,
        rope_scaling={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "mixtral": lambda: t.MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2, sliding_window=7),
    "qwen3_moe": lambda: t.Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, mlp_only_layers=[0]
    ),
    "qwen3_moe-normalised": lambda: t.Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1
    ),
    "deepseek_v3": lambda: t.DeepseekV3Config(**LATENT, rope_parameters=dict(YARN)),
    "deepseek_v3-plain": lambda: t.DeepseekV3Config(
        **{**LATENT, "q_lora_rank": None}, rope_interleave=False, norm_topk_prob=False
    ),
    "deepseek_v2": lambda: t.DeepseekV2Config(**LATENT, topk_method="group_limited_greedy", routed_scaling_factor=3.0),
}
"""name -> configuration. Sliding windows are shorter than the sequences of the tests."""


def tiny(name: str, seed: int = 0) -> Any:
    """A random float32 `transformers` model whose every parameter (norms and biases too) is away from its default."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn(buffer.shape))
    return model


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and raw bytes (so that -0.0 and 0.0 differ)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
