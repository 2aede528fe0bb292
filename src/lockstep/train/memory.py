"""Whether a run fits this machine's memory, told before anything is allocated: Linux kills what does not."""

from __future__ import annotations

import os

from lockstep.config import ModelConfig
from lockstep.config.parallel import ParallelConfig
from lockstep.errors import LockstepError
from lockstep.model import Decoder

_PARTS = ((8, 1), (4, 2), (4, 3))
"""Bytes of a parameter, and the level from which replicas share them out: two moments, gradient, weight, float32."""
_FROZEN = 4
"""Bytes of a weight that does not train, as it is drawn."""


def check_memory(shape: ModelConfig, adapters: bool, parallel: ParallelConfig) -> None:
    """Raise where one rank's weights and optimizer alone exceed the machine's memory. Activations come on top."""
    trained = sum(size / (parallel.dp if parallel.fsdp >= level else 1) for size, level in _PARTS)
    cut, spread = parallel.pp * parallel.tp, _experts(shape) * (1 - 1 / parallel.ep)
    needed, there = (parameters(shape) - spread) / cut * (_FROZEN if adapters else trained), machine_memory()
    if there is not None and needed > there:
        share = "a rank's share of the" if parallel.pp * parallel.tp * parallel.dp > 1 else "its"
        raise LockstepError(
            f"the model has {parameters(shape):.3g} parameters; {share} weights, gradients and moments take "
            f"{needed / 2**30:,.0f} GiB, and this machine has {there / 2**30:,.0f} GiB: make model.hidden_size, "
            "model.num_layers or model.vocab_size smaller, or share them out over more machines (parallel.pp, "
            "parallel.fsdp; `lockstep plan` finds how)"
        )


def parameters(shape: ModelConfig) -> int:
    """How many parameters a decoder of this shape has, without making its layers."""
    first = min(shape.dense_layers, shape.num_layers) if shape.num_experts else shape.num_layers
    total = 0
    for layers, dense in ((first, 1), (shape.num_layers - first, 0)):
        if layers:
            one = Decoder(shape.model_copy(update={"num_layers": 1, "dense_layers": dense}))
            layer = sum(p.numel() for p in one.layers.parameters())
            total += layers * layer
            rest = sum(p.numel() for p in one.parameters()) - layer
    return total + rest


def _experts(shape: ModelConfig) -> int:
    """How many of them are experts' own."""
    layers = max(shape.num_layers - shape.dense_layers, 0) if shape.num_experts else 0
    return layers * shape.num_experts * 3 * shape.hidden_size * (shape.expert_intermediate_size or 0)


def machine_memory() -> int | None:
    """Physical memory in bytes; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
