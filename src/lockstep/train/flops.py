"""Floating-point operations of a training step, for MFU (PaLM's definition: what the model needs, not what is run)."""

from __future__ import annotations

from lockstep.config import ModelConfig
from lockstep.model.decoder import Decoder
from lockstep.model.moe import Experts
from lockstep.train.data import Batch


def step_flops(decoder: Decoder, batches: list[Batch], adapters_only: bool = False) -> float:
    """2 per weight and token in the matrix products, 4 per channel and visible key in attention; backward doubles
    both. ``adapters_only``: the frozen weights have no weight gradient, so their backward costs one forward.
    """
    config = decoder.config
    tokens = sum(len(b.tokens) for b in batches)
    keys = sum(_visible(b) for b in batches)
    products = 2.0 * matrix_weights(decoder) * tokens * (2.0 if adapters_only else 3.0)
    return products + attention_flops(config) * keys * 3.0


def attention_flops(config: ModelConfig) -> float:
    """Forward, of a query and a key that it sees, over all layers."""
    channels = config.head_dim + (config.head_dim if config.v_head_dim is None else config.v_head_dim)
    return 2.0 * config.num_layers * config.num_heads * channels


def matrix_weights(decoder: Decoder) -> int:
    """Weights that multiply a token: all matrices, of experts as many as a token goes to; the embedding only where it
    is the output head."""
    matrices = sum(p.numel() for p in decoder.parameters() if p.dim() == 2)
    routed = sum(p.numel() for m in decoder.modules() if isinstance(m, Experts) for p in m.parameters())
    if routed:
        matrices -= routed - routed // decoder.config.num_experts * decoder.config.experts_per_token
    return matrices if decoder.output is None else matrices - decoder.embed.weight.numel()


def _visible(batch: Batch) -> float:
    """Pairs of query and key under the causal mask; a sliding window is not taken off."""
    lengths = batch.packed.starts.diff().double()
    return float((lengths * (lengths + 1) / 2).sum())
