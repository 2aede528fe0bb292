"""How a run is laid over processes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lockstep.config.section import Section


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class ParallelConfig(Section):
    """How a run is laid over processes: pp x dp x cp x tp of them. A layout changes speed and memory, never a bit."""

    dp: int = Field(default=1, ge=1)
    """Data-parallel replicas: each takes its run of the global batch's `train.micro_batches`."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel ranks of a layer; divides the model's canonical_tp (`train.canonical_tp`)."""
    pp: int = Field(default=1, ge=1)
    """Pipeline stages."""
    cp: int = Field(default=1, ge=1)
    """Context-parallel ranks of a sequence. Planned for only: this version runs 1."""
    ep: int = Field(default=1, ge=1)
    """Expert-parallel ranks, among dp x cp. Planned for only: this version runs 1."""
    fsdp: int = Field(default=0, ge=0, le=3)
    """What is sharded over dp: 0 nothing, 1 the optimizer's moments (ZeRO-1); 2 (gradients too) and 3 (weights too)
    are planned for only."""
    schedule: str = "1f1b"
    """The pipeline schedule: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-1p, zb-2p, zb-v, v-half, v-min or
    dualpipe-v; or a file (.yaml, .json) that holds a table, such as one that `lockstep.plan.search_schedule` made."""
    chunks: int | None = Field(default=None, ge=1)
    """Layer groups per stage, for `interleaved`; the other schedules have one or two."""
    layers_per_stage: Annotated[tuple[int, ...], BeforeValidator(_as_tuple)] = ()
    """Layers of each pipeline stage; empty: evenly."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations: `full` keeps only the input of each layer and runs it again in the backward pass. `selective` drops
    attention scores, which the attention kernel never keeps: the same as `none`."""
    recompute_layers: int = Field(default=0, ge=0)
    """With `none` and `selective`: how many layers of each stage are recomputed."""
    recompute_per_stage: Annotated[tuple[int, ...], BeforeValidator(_as_tuple)] = ()
    """Instead of `recompute_layers`: a number for each pipeline stage."""
