"""A step on meta tensors in a process that finds no compiler and no built kernels."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lockstep.config.model import ModelConfig
from lockstep.model.decoder import Decoder
from lockstep.ops import Packed, operators


def dry_run(no_cache: Path) -> tuple[tuple[int, ...], torch.dtype, str]:
    """Shape, dtype and device of what comes out."""
    os.environ |= {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(no_cache)}
    config = ModelConfig(
        vocab_size=128_256, hidden_size=8192, intermediate_size=28672, num_layers=2, num_heads=64, num_kv_heads=8,
        max_positions=131072,
    )  # fmt: skip
    decoder, ops = Decoder(config), operators("bitwise", kernels=False)
    tokens = torch.empty(8192, dtype=torch.int64, device="meta")
    batch = Packed(*(x.to("meta") for x in (torch.empty(8192, dtype=torch.int32), torch.empty(3, dtype=torch.int32))))
    hidden = decoder(ops, tokens, batch)
    loss, _ = ops.linear_cross_entropy(hidden, decoder.head_weight, tokens, torch.empty(8192, device="meta"))
    loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape and p.grad.is_meta for p in decoder.parameters())
    assert "liblockstep" not in Path("/proc/self/maps").read_text(), "the kernels were loaded"
    return tuple(hidden.shape), hidden.dtype, loss.device.type
