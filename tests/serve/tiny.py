"""A tiny random model."""

from __future__ import annotations

import torch

from lockstep.config.model import ModelConfig
from lockstep.model.init import random_decoder
from lockstep.model.model import Model
from lockstep.model.tokenizer import train_bpe
from lockstep.ops import operators

TEXT = (
    "the quick brown fox jumps over the lazy dog",
    "Grüße aus Köln, 你好 🙂 and 3.14 = π",
    "def f(x):\n    return x + 1\n",
)


def tiny_model(dtype: torch.dtype = torch.bfloat16, **changes: object) -> Model:
    """Two layers; the head is scaled up so that the distribution is neither flat nor a single peak."""
    tokenizer = train_bpe(iter(TEXT * 20), 320)
    sizes = {
        "vocab_size": tokenizer.vocab_size, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4,
        "num_kv_heads": 2, "max_positions": 1024,
    }  # fmt: skip
    decoder = random_decoder(ModelConfig(**{**sizes, **changes}), 3)
    for name, parameter in decoder.named_parameters():
        parameter.data *= 20 if "output" in name else 5 if "norm" not in name else 1
    return Model(decoder.eval(), tokenizer, operators(), dtype)


def page_bytes(model: Model) -> int:
    config = model.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 64 * model.dtype.itemsize
