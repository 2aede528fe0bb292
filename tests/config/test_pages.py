"""The size of a page by arithmetic is that of the tensors that are made."""

from __future__ import annotations

import pytest
import torch

from lockstep.config.model import ModelConfig
from lockstep.config.pages import page_dtype, page_size
from lockstep.errors import LockstepError
from lockstep.model.pages import make_pages

SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
    "max_positions": 128,
}  # fmt: skip
LATENTS = {
    "num_kv_heads": 4, "head_dim": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "numerics", "dtype"),
    [
        ({}, "bitwise", "bfloat16"),
        ({"head_dim": 24}, "bitwise", "float32"),
        ({}, "fast", "int8"),
        (LATENTS, "bitwise", "bfloat16"),
        ({**LATENTS, "mla_form": "absorbed"}, "bitwise", "float32"),
        (LATENTS, "fast", "bfloat16"),
    ],
)
def test_a_page_has_the_bytes_of_its_tensors(changes, numerics, dtype):
    config = ModelConfig(**{**SIZES, **changes})
    made = make_pages(config, numerics, 1, getattr(torch, dtype), lambda shape, kind: torch.empty(shape, dtype=kind))
    assert page_size(config, numerics, dtype) == sum(t.nbytes for layer in made for t in vars(layer).values())


def test_eight_bits_are_refused_where_they_break_a_promise_or_save_nothing():
    plain, latents = ModelConfig(**SIZES), ModelConfig(**{**SIZES, **LATENTS})
    assert page_dtype(plain, "bitwise", "float32", "auto") == "float32"
    assert page_dtype(plain, "fast", "float32", "int8") == "int8"
    with pytest.raises(LockstepError, match="breaks the bit contract"):
        page_dtype(plain, "bitwise", "bfloat16", "int8")
    with pytest.raises(LockstepError, match="caches latents"):
        page_dtype(latents, "fast", "bfloat16", "int8")
