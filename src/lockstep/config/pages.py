"""The pages of keys and values before there are any: what they keep, and how large one is. Imports no PyTorch."""

from __future__ import annotations

from typing import Literal

from lockstep.config.model import ModelConfig
from lockstep.errors import LockstepError

PAGE = 64
"""Tokens in a KV page, and keys in an attention block. Blocks are aligned to position 0 of a sequence."""

_SIZES = {"bfloat16": 2, "float32": 4, "int8": 1}
_SCALE = 4
"""Bytes of an int8 head's scale for one token, float32."""


def keeps_latents(config: ModelConfig, numerics: Literal["bitwise", "fast"]) -> bool:
    """Whether pages keep latents, rather than keys and values of every head."""
    return config.kv_lora_rank is not None and (config.mla_form == "absorbed" or numerics == "fast")


def page_dtype(
    config: ModelConfig, numerics: Literal["bitwise", "fast"], dtype: str, kv_dtype: Literal["auto", "int8"]
) -> str:
    """What keys and values are kept in, by name; LockstepError where int8 breaks a promise, or saves nothing.

    dtype: the model's.
    """
    if kv_dtype == "auto":
        return dtype
    if numerics != "fast":
        raise LockstepError(
            "kv_dtype is int8, which rounds keys and values and so breaks the bit contract: load the model with "
            "numerics fast (--numerics fast), or leave kv_dtype at auto."
        )
    if config.latent_dim is not None:
        raise LockstepError("kv_dtype is int8, but this model caches latents, which are small already: use auto.")
    return "int8"


def page_size(config: ModelConfig, numerics: Literal["bitwise", "fast"], dtype: str) -> int:
    """Bytes of one page over all layers. dtype: what `page_dtype` gives."""
    if config.latent_dim is not None and keeps_latents(config, numerics):
        token = config.latent_dim * _SIZES[dtype]
    else:
        head = (config.head_dim + (config.v_head_dim or config.head_dim)) * _SIZES[dtype]
        token = config.num_kv_heads * (head + (2 * _SCALE if dtype == "int8" else 0))
    return config.num_layers * PAGE * token
