"""What layers keep from their forward to their backward pass: all, only their input, or all of it away from the device.

A layer that is recomputed runs again in the backward pass. One that is offloaded finds what it kept in host memory or
on disk (`memory/offload.py`). Either way the same operators see the same values, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.model.decoder import BlockCall

Kind = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Treated:
    """Layers by what becomes of their activations: run again, moved away; all others keep them."""

    again: frozenset[int] = frozenset()
    away: frozenset[int] = frozenset()


@dataclass(frozen=True)
class LayerPolicy:
    """recompute: `full` recomputes every layer; `none` and `selective` recompute ``recompute_layers`` of every stage,
    its first ones. ``offload_layers``: so many of those that come next are offloaded. The first layers of a stage wait
    longest for their backward.

    `selective` would drop attention scores; the attention kernel never keeps them, so there it is `none`.
    """

    recompute: Kind = "none"
    recompute_layers: int = 0
    offload_layers: int = 0

    def chosen(self, held: list[int]) -> Treated:
        """Of the layers that a stage holds, in order."""
        first = len(held) if self.recompute == "full" else self.recompute_layers
        return Treated(frozenset(held[:first]), frozenset(held[first : first + self.offload_layers]))


def recomputing(layers: Collection[int]) -> BlockCall:
    """How blocks are called such that these layers are recomputed. The same operators run again: the same bits."""

    def call(layer: int, block: nn.Module, *arguments: object) -> Tensor:
        if layer not in layers or not torch.is_grad_enabled():
            x: Tensor = block(*arguments)
            return x
        again: Tensor = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
        return again

    return call
