"""The models that benches run: shapes with random weights, so that nothing has to be fetched."""

from __future__ import annotations

from lockstep.config import ModelConfig
from lockstep.errors import LockstepError

SHAPES = {
    "tiny": ModelConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        max_positions=512, tie_embeddings=True,
    ),
    "llama-27m": ModelConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_layers=8, num_heads=8, num_kv_heads=4,
        head_dim=64, max_positions=512, tie_embeddings=True,
    ),
    "smollm2-135m": ModelConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, max_positions=2048, rope_theta=100000.0, tie_embeddings=True,
    ),
}  # fmt: skip


def shape(name: str) -> ModelConfig:
    """The shape of this name; LockstepError where there is none."""
    if name not in SHAPES:
        raise LockstepError(f"--model is {name!r}: known shapes are {', '.join(SHAPES)}.")
    return SHAPES[name]
