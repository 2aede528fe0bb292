"""Tiny decoders of every family for the tests of the compiler, and what the eager decoder gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.config import ModelConfig
from lockstep.model import Decoder, random_decoder
from lockstep.model.moe import Routed, balance_loss
from lockstep.ops import Operators, Packed

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "max_positions": 128,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_kv_heads": 4, "head_dim": 32, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "rope_interleaved": True, "expert_intermediate_size": 24,
    "num_experts": 4, "shared_experts": 1, "experts_per_token": 2, "dense_layers": 1, "router_groups": 2,
    "router_top_groups": 1, "num_layers": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "tie_embeddings": True},
    "mistral": {"family": "mistral", "sliding_window": 7},
    "qwen2": {"family": "qwen2", "qkv_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True, "head_dim": 32, "tie_embeddings": True},
    "gemma2": {
        "family": "gemma2", "post_norms": True, "norm_offset": 1.0, "activation": "gelu_tanh", "embedding_scale": 8.0,
        "sliding_window": 7, "layer_windows": [True, False, True], "tie_embeddings": True,
        "attention_softcap": 5.0, "logit_softcap": 3.0,
    },
    "mixtral": {
        "family": "mixtral", "num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 48,
        "router_scoring": "softmax", "router_normalize": True,
    },
    "qwen3_moe": {
        "family": "qwen3_moe", "qk_norm": True, "num_experts": 5, "experts_per_token": 3, "dense_layers": 1,
        "expert_intermediate_size": 24, "router_normalize": False, "router_aux_loss": 0.5,
    },
    "deepseek_v2": {**LATENT, "family": "deepseek_v2", "router_normalize": False, "router_scale": 3.0},
    "deepseek_v3": {**LATENT, "family": "deepseek_v3", "router_scoring": "sigmoid", "router_aux_loss": 0.5},
    "deepseek_v3 absorbed": {
        **LATENT, "family": "deepseek_v3", "q_lora_rank": None, "router_scoring": "sigmoid", "mla_form": "absorbed",
    },
    "gemma3": {
        "family": "gemma3_text", "qk_norm": True, "post_norms": True, "norm_offset": 1.0, "activation": "gelu_tanh",
        "embedding_scale": 8.0, "sliding_window": 7, "layer_windows": [True, True, False], "rope_theta_local": 1e4,
        "rope_theta": 1e6, "tie_embeddings": True,
    },
}  # fmt: skip
DTYPES = (torch.bfloat16, torch.float32)


def decoder(family: str, **sizes: Any) -> Decoder:
    """A random decoder, every parameter away from its initial value."""
    made = random_decoder(ModelConfig.model_validate({**SIZES, **FAMILIES[family], **sizes}), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(not name.endswith("router.bias"))  # for the choice alone
    return made.train()


def batch(lengths: list[int], vocabulary: int = 96, seed: int = 0) -> tuple[Tensor, Tensor, Packed, Tensor]:
    """tokens, targets (some without loss), the packing and the weights of tokens."""
    generator, rows = torch.Generator().manual_seed(seed), sum(lengths)
    tokens, targets = torch.randint(vocabulary, (2, rows), generator=generator)
    targets[::5] = -1
    return tokens, targets, Packed.of(lengths), torch.full((rows,), 1.0 / rows)


def eager(made: Decoder, ops: Operators, dtype: torch.dtype, lengths: list[int], z_loss: float = 0.0) -> list[Tensor]:
    """Objective, log-probabilities and every gradient, operator by operator."""
    tokens, targets, packed, weights = batch(lengths)
    routed: list[Routed] = []
    hidden = made(ops, tokens, packed, dtype=dtype, routed=routed)
    return differentiate(made, ops, hidden, targets, weights, z_loss, routed)


def differentiate(
    made: Decoder,
    ops: Operators,
    hidden: Tensor,
    targets: Tensor,
    weights: Tensor,
    z_loss: float = 0.0,
    routed: Sequence[Routed] = (),
) -> list[Tensor]:
    """With the load-balance loss of what was routed, where the model has one."""
    objective, logprobs = ops.linear_cross_entropy(
        hidden, made.head_weight, targets, weights, z_loss=z_loss, softcap=made.logit_softcap
    )
    if made.config.router_aux_loss:
        objective = objective + made.config.router_aux_loss * balance_loss(ops, routed)
    objective.backward()
    found = [objective.detach(), logprobs, *(p.grad for p in made.parameters() if p.requires_grad)]
    made.zero_grad(set_to_none=True)
    return [tensor for tensor in found if tensor is not None]


def same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    """Equal shapes, dtypes and raw bytes."""
    return len(mine) == len(theirs) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.contiguous().flatten().view(torch.uint8).equal(
            b.contiguous().flatten().view(torch.uint8)
        )
        for a, b in zip(mine, theirs, strict=True)
    )  # fmt: skip
