"""Random initialisation by seed: every tensor draws from its own stream, so order and layout do not matter."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from lockstep.config.model import ModelConfig
from lockstep.model.decoder import Decoder

_STD = 0.02


def random_decoder(config: ModelConfig, seed: int) -> Decoder:
    """A decoder with float32 parameters drawn by seed; the same seed and config give the same bits.

    Matrices are normal with standard deviation 0.02; the projections back into the residual stream (attention
    output, MLP down) have it divided by sqrt(2 num_layers) (GPT-2); biases are 0, norms the identity.
    """
    decoder = Decoder(config)
    for name, parameter in list(decoder.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        drawn = draw(name, parameter.shape, config, seed)
        setattr(decoder.get_submodule(owner), leaf, nn.Parameter(drawn, requires_grad=parameter.requires_grad))
    return decoder


def draw(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """The initial value of one parameter of a model of this configuration: a function of seed and name alone."""
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.full(shape, 1.0 - config.norm_offset)
    residual = name.endswith(("attn.o.weight", ".down.weight"))
    std = _STD / (2 * config.num_layers) ** 0.5 if residual else _STD
    return torch.empty(shape).normal_(0.0, std, generator=stream(seed, name))


def stream(seed: int, name: str) -> torch.Generator:
    """The random stream of one tensor: keyed by (seed, name)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
