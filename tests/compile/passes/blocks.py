"""Transformer blocks as graphs: trained (forward and backward) and served (pages), with inputs to run them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lockstep.config.model import ModelConfig
from lockstep.model.decoder import Block
from lockstep.model.init import random_decoder
from lockstep.ops import KVPages, Packed, Paged, operators

BATCH = Packed.of([5, 7])
ROWS, WIDTH = 12, 64


def config(**more: Any) -> ModelConfig:
    sizes = {"vocab_size": 96, "hidden_size": WIDTH, "intermediate_size": 48, "num_layers": 1, "num_heads": 4}
    return ModelConfig(**{**sizes, "num_kv_heads": 2, "head_dim": 16, "max_positions": 64, **more})


def trained(model: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> tuple[fx.GraphModule, list[Tensor]]:
    """x, gradient of the result, positions, starts, rotary table, weights -> the result, then all gradients."""
    decoder, ops = random_decoder(model, 0), operators("bitwise")
    block = decoder.layers[0]
    assert isinstance(block, Block)
    weights = dict(block.named_parameters())
    table = torch.randn(64, model.head_dim // 2, 2, generator=_random())
    x, seed = (torch.randn(ROWS, WIDTH, generator=_random(i)) for i in (1, 2))
    inputs = [x, seed, BATCH.positions, BATCH.starts, table, *(w.detach() for w in weights.values())]

    def step(x: Tensor, seed: Tensor, positions: Tensor, starts: Tensor, table: Tensor, *given: Tensor) -> Any:
        leaves = [t.detach().requires_grad_() for t in (x, *given)]
        named = dict(zip(weights, leaves[1:], strict=True))
        y = torch.func.functional_call(block, named, (ops, leaves[0], Packed(positions, starts), table, None, dtype))
        return (y, *torch.autograd.grad(y, leaves, seed))

    return _captured(step, inputs), inputs


def served(model: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> tuple[fx.GraphModule, list[Tensor]]:
    """x, positions, starts, page table, pages of keys and values, rotary table, weights -> the result."""
    decoder, ops = random_decoder(model, 0), operators("bitwise")
    block = decoder.layers[0]
    assert isinstance(block, Block)
    weights, pages = dict(block.named_parameters()), KVPages.zeros(4, model.num_kv_heads, model.head_dim, dtype)
    table = torch.randn(64, model.head_dim // 2, 2, generator=_random())
    where = torch.tensor([[2], [0]], dtype=torch.int32)
    x = torch.randn(ROWS, WIDTH, generator=_random(1))
    inputs = [x, BATCH.positions, BATCH.starts, where, pages.k, pages.v, table, *(w.detach() for w in weights.values())]

    def step(x: Tensor, positions: Tensor, starts: Tensor, where: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Any:
        named, batch = dict(zip(weights, rest[1:], strict=True)), Paged(positions, starts, where)
        with torch.no_grad():
            return torch.func.functional_call(block, named, (ops, x, batch, rest[0], KVPages(k, v), dtype))

    return _captured(step, inputs), inputs


def _captured(step: Any, inputs: list[Tensor]) -> fx.GraphModule:
    with FakeTensorMode() as mode:
        return make_fx(step)(*map(mode.from_tensor, inputs))


def _random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
