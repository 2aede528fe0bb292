"""A rank's part of a model that is served with everything cut by outputs, and experts spread: any `canonical_tp`."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lockstep.config.model import ModelConfig
from lockstep.model.split import expert_of
from lockstep.ops import Operators
from lockstep.ops.cut_vocabulary import cut_vocabulary
from lockstep.ops.gathered import gathered_operators
from lockstep.ops.head_parts import Segments
from lockstep.ops.held_experts import held_experts
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.head import shared_head

_HEADS = ("attn.q", "attn.q_b", "attn.kv_b", "mlp.gate", "mlp.up", "attn.o", "mlp.down")
"""Within a layer, what is cut evenly by outputs: heads, the MLP's width, and what reads all of either."""
_KEYS = ("attn.k", "attn.v")
"""Cut by key heads; where there are fewer than ranks, neighbours have the same one."""


class Gathered:
    """What the rank at a place of the ``tp`` axis holds; what `Partition` is for models that are cut into segments.

    local: the configuration of its own decoder: its share of the heads. The shapes of what reads all heads, and of
    experts, are `slice_of`'s: an expert of another rank has no rows here.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh) -> None:
        self.config, self.mesh, ranks = config, mesh, mesh.shape.tp
        self.local = config.model_copy(update={
            "num_heads": config.num_heads // ranks,
            "num_kv_heads": max(config.num_kv_heads // ranks, 1),
            "intermediate_size": config.intermediate_size // ranks,
        })  # fmt: skip

    @property
    def place(self) -> str:
        """Which part it is of how many, in words."""
        return f"rank {self.mesh['tp'].index} of {self.mesh.shape.tp}, gathered"

    def take(self, name: str, whole: Tensor) -> Tensor:
        """This rank's slice of a whole tensor: a view."""
        return self.slice_of(self.mesh["tp"].index, name, whole)

    def slice_of(self, rank: int, name: str, whole: Tensor) -> Tensor:
        """The slice of the rank at this place: a view."""
        ranks, expert = self.mesh.shape.tp, expert_of(name)
        if expert is not None:
            return whole if expert * ranks // self.config.num_experts == rank else whole[:0]
        _, _, inner = name.rpartition(".")[0].partition("layers.")
        module = inner.partition(".")[2]
        if module in _KEYS:
            heads = self.config.num_kv_heads
            return whole.tensor_split(min(heads, ranks))[rank * min(heads, ranks) // ranks]
        return whole.tensor_split(ranks)[rank] if module in _HEADS else whole

    def operators(self, ops: Operators) -> Operators:
        """The operators whose results are gathered from the ranks."""
        axis, segments = self.mesh["tp"], self.config.canonical_tp
        ops = cut_vocabulary(ops, Segments(self.config.vocab_size, segments, segments))
        found = gathered_operators(ops, segments, axis)
        if self.config.num_experts:
            found = held_experts(found, axis)
        head = shared_head(ops, axis, self.config.vocab_size)
        return replace(found, cut={**found.cut, "vocabulary": head})
