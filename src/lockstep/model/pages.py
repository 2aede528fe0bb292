"""The pages in which a model keeps what later tokens attend to: which kind, and of what shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.config.model import ModelConfig
from lockstep.config.pages import PAGE, keeps_latents
from lockstep.ops import Int8Pages, KVPages, LatentPages, Numerics, Pages

Make = Callable[[tuple[int, ...], torch.dtype], Tensor]


def make_pages(config: ModelConfig, numerics: Numerics, count: int, dtype: torch.dtype, make: Make) -> list[Pages]:
    """`count` pages for every layer, each tensor made from its shape and dtype by `make`.

    dtype: bfloat16, float32, or int8 for keys and values with scales.
    """
    return [_pages(config, numerics, count, dtype, make) for _ in range(config.num_layers)]


def _pages(config: ModelConfig, numerics: Numerics, count: int, dtype: torch.dtype, make: Make) -> Pages:
    if config.latent_dim is not None and keeps_latents(config, numerics):
        return LatentPages(make((count, PAGE, config.latent_dim), dtype))
    heads = (count, config.num_kv_heads)
    dim, v_dim = config.head_dim, config.v_head_dim or config.head_dim
    k, v = make((*heads, dim, PAGE), dtype), make((*heads, PAGE, v_dim), dtype)
    if dtype == torch.int8:
        scales = (*heads, PAGE)
        return Int8Pages(k, v, make(scales, torch.float32), make(scales, torch.float32))
    return KVPages(k, v)
