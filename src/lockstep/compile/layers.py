"""The layers of a decoder as kinds: identical blocks are compiled once, and every block keeps its own weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lockstep.compile.compiler import Compiler
from lockstep.compile.halves import Halves
from lockstep.compile.recipe import Place
from lockstep.compile.stage import Leaf, block_stage
from lockstep.model.decoder import Block, Decoder
from lockstep.ops import Operators, Packed, Paged, Pages
from lockstep.ops.cut_linear import WeightQueue
from lockstep.ops.spread_experts import own_weights

if TYPE_CHECKING:
    from lockstep.parallel.nodes import Group


@dataclass(frozen=True)
class Layer:
    """A block with its recipes and weights. wanted: whether the gradient of its input is asked for. slides: whether it
    has the second of the decoder's two rotary tables."""

    block: Block
    halves: Halves
    leaves: tuple[Leaf, ...]
    wanted: bool
    slides: bool

    @property
    def routed(self) -> tuple[Place, ...]:
        """What the router gives besides the stream (logits, offsets), where it was asked for and there is one."""
        outputs = self.halves.forward.outputs
        return outputs[1 : len(outputs) - self.halves.saved]

    @property
    def trained(self) -> list[int]:
        """Which of the leaves have a gradient, by index; with `wanted` before them, the backward's results."""
        return [i for i, leaf in enumerate(self.leaves) if leaf.given.differentiated]

    def put_late(self, experts: Group, queue: WeightQueue) -> None:
        """Queue the gradients of weights that the experts of this layer have put off, where ranks share experts out."""
        late, experts.late = experts.late, []
        kinds = ([leaf for leaf in self.leaves if _is_experts(leaf.name, kind)] for kind in ("gate", "up", "down"))
        here = own_weights(experts.axis, *kinds)
        for one in late:
            queue.put(here[one.weight].tensor, one.gradient, one.source)


def _is_experts(leaf: str, kind: str) -> bool:
    return leaf.startswith("mlp.experts.") and leaf.endswith(f".{kind}.weight")


def compiled_layers(
    decoder: Decoder,
    ops: Operators,
    batch: Packed | Paged,
    cache: Sequence[Pages] | None,
    dtype: torch.dtype,
    compiler: Compiler,
    routed: bool = False,
    only: range | None = None,
    wanted: bool | None = None,
    deferring: bool = False,
) -> list[Layer]:
    """Every block of a decoder, compiled for batches of this kind; with gradients where they are recorded.

    routed: what routers did is a result too. only: these layers. wanted: whether the gradient of the first one's input
    is (by default where an embedding before it trains). deferring: gradients of weights have a recipe of their own.
    """
    full, sliding = decoder.rope_tables(batch)
    if wanted is None:
        wanted = torch.is_grad_enabled() and decoder.embed.weight.requires_grad
    found = []
    for i in only or range(len(decoder.layers)):
        block = decoder.layers[i]
        assert isinstance(block, Block)
        slides = decoder.config.slides(i)
        table = sliding if slides else full
        stage = block_stage(block, ops, batch, table, None if cache is None else cache[i], dtype, wanted, routed)
        halves = compiler.compile(stage.deferring() if deferring else stage)
        layer = Layer(block, halves, stage.leaves, wanted, slides)
        found.append(layer)
        wanted = wanted or bool(layer.trained)
    return found
