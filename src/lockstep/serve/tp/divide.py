"""Which models several processes can serve together. Imports no PyTorch: a server knows before it starts any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.config.model import ModelConfig
from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.ops import Numerics


def fitted(config: ModelConfig, tp: int, numerics: Numerics) -> ModelConfig:
    """The configuration that ``tp`` processes serve: the model's own, whose `canonical_tp` says how sums are made.

    With `numerics: fast`, which promises no bits, sums are made over the processes wherever that can be. Raises
    LockstepError for a model that does not divide, with what to change.
    """
    if in_segments(config, tp):
        return config
    even = tp & (tp - 1) == 0 and config.num_kv_heads % tp == config.intermediate_size % tp == 0
    plain = not config.num_experts and config.kv_lora_rank is None
    if numerics == "fast" and config.canonical_tp == 1 and even and plain:
        return config.model_copy(update={"canonical_tp": tp})
    dense = not config.num_experts or config.dense_layers > 0
    repeated = config.kv_lora_rank is not None or tp % config.num_kv_heads == 0
    wrong = (
        (config.num_heads % tp, f"{config.num_heads} attention heads"),
        (config.num_kv_heads % tp and not repeated, f"{config.num_kv_heads} key heads (or be a multiple of them)"),
        (dense and config.intermediate_size % tp, f"width of its MLP, {config.intermediate_size}"),
        (config.hidden_size % tp, f"hidden size, {config.hidden_size}"),
        (config.num_experts % tp, f"{config.num_experts} experts"),
    )
    for remainder, what in wrong:
        if remainder:
            raise LockstepError(
                f"tp is {tp}: it must divide the model's {what}; choose another, or serve it with tp 1; several "
                "engines side by side are --replicas."
            )
    return config


def in_segments(config: ModelConfig, tp: int) -> bool:
    """Whether the model's `canonical_tp` lets ``tp`` processes share its sums."""
    return config.canonical_tp % tp == 0
