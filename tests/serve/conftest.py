"""A tiny random model with a byte-level tokenizer, and engines on it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lockstep.config.model import ModelConfig
from lockstep.model.init import random_decoder
from lockstep.model.tokenizer import train_bpe
from lockstep.ops import Packed, operators

TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "Grüße aus Köln, 你好 🙂 and 3.14 = π",
    "def f(x):\n    return x + 1\n",
]


class Tiny(SimpleNamespace):
    def logprobs(self, ids):
        with torch.no_grad():
            hidden = self.decoder(self.ops, torch.tensor(ids), Packed.of([len(ids)]), None, self.dtype)
            logits = self.decoder.head(self.ops, hidden)
            return self.ops.select_logprobs(logits[:-1], torch.tensor(ids[1:]))


@pytest.fixture(scope="session")
def model():
    tokenizer = train_bpe(iter(TEXT * 20), 320)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
        num_kv_heads=2, max_positions=1024, tie_embeddings=True,
    )  # fmt: skip
    decoder = random_decoder(config, 3)
    decoder.embed.weight.data *= 8
    return Tiny(config=config, decoder=decoder, tokenizer=tokenizer, ops=operators(), dtype=torch.bfloat16)
