"""From what the planner knows of a model to a decoder that can be gone through, and back."""

from __future__ import annotations

from typing import Any

from lockstep.config import ModelConfig
from lockstep.config.check import check
from lockstep.errors import NotRunError
from lockstep.plan.shape import ModelShape


def decoder_config(shape: ModelShape, positions: int) -> ModelConfig:
    """The decoder of a planner's shape, for sequences of up to ``positions`` tokens.

    Raises LockstepError for a GPT of 2019 (learned positions, an MLP without a gate), which this system does not train,
    and for sizes that no decoder has.
    """
    if not shape.gated or shape.positions:
        raise NotRunError(
            f"{shape.name} has learned positions or an MLP without a gate: it can be planned for, but not trained "
            "here. Choose a Llama-like model"
        )
    fields: dict[str, Any] = {
        "vocab_size": shape.vocab, "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
        "num_layers": shape.layers, "num_heads": shape.heads, "num_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "max_positions": positions, "tie_embeddings": shape.tied,
    }  # fmt: skip
    if shape.kv_lora_rank:
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        fields |= {name: getattr(shape, name) for name in names} | {"q_lora_rank": shape.q_lora_rank or None}
    if shape.experts:
        fields |= {
            "num_experts": shape.experts, "experts_per_token": shape.experts_per_token,
            "expert_intermediate_size": shape.expert_intermediate, "dense_layers": shape.dense_layers,
            "shared_experts": shape.shared_intermediate // shape.expert_intermediate,
        }  # fmt: skip
    return check(ModelConfig, fields, f"model {shape.name}")


def planner_shape(config: ModelConfig) -> ModelShape:
    """What the planner knows of a model."""
    return ModelShape(
        name=config.family,
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        vocab=config.vocab_size,
        intermediate=config.intermediate_size,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        gated=True,
        tied=config.tie_embeddings,
        experts=config.num_experts,
        experts_per_token=config.experts_per_token if config.num_experts else 0,
        expert_intermediate=(config.expert_intermediate_size or 0) if config.num_experts else 0,
        shared_intermediate=config.shared_experts * (config.expert_intermediate_size or 0),
        dense_layers=config.dense_layers,
        kv_lora_rank=config.kv_lora_rank or 0,
        q_lora_rank=config.q_lora_rank or 0,
        qk_nope_head_dim=config.qk_nope_head_dim or 0,
        qk_rope_head_dim=config.qk_rope_head_dim or 0,
        v_head_dim=config.v_head_dim or 0,
    )
