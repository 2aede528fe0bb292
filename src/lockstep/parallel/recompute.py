"""Activation recompute as a policy: which layers keep only their input, and run again in the backward pass."""

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
class RecomputePolicy:
    """kind: `full` recomputes every layer; `none` and `selective` recompute ``layers`` of every stage, its first ones.

    `selective` would drop attention scores; the attention kernel never keeps them, so there it is `none`.
    """

    kind: Kind = "none"
    layers: int = 0

    def chosen(self, held: list[int]) -> frozenset[int]:
        """Of the layers that a stage holds, those that are recomputed."""
        return frozenset(held if self.kind == "full" else held[: self.layers])


def recomputing(layers: Collection[int]) -> BlockCall:
    """How blocks are called such that these layers are recomputed. The same operators run again: the same bits."""

    def call(layer: int, block: nn.Module, *arguments: object) -> Tensor:
        if layer not in layers or not torch.is_grad_enabled():
            x: Tensor = block(*arguments)
            return x
        again: Tensor = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
        return again

    return call
