"""How a run is laid over processes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lockstep.config.section import Section

BUCKET_MB = 25
"""Of gradients that go as one message, where nothing else is asked for: that of PyTorch's DistributedDataParallel."""


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class ParallelConfig(Section):
    """How a run is laid over processes: pp x dp x cp x tp of them. A layout changes speed and memory, never a bit."""

    dp: int = Field(default=1, ge=1)
    """Data-parallel replicas: each takes its run of the global batch's `train.micro_batches`."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel ranks of a layer; divides the model's canonical_tp (`train.canonical_tp`)."""
    sequence_parallel: bool = False
    """With `tp`: ranks share out the rows of what lies between the layers' cut products (the residual stream, norms),
    which are then kept once in all instead of once on each rank."""
    pp: int = Field(default=1, ge=1)
    """Pipeline stages."""
    cp: int = Field(default=1, ge=1)
    """Context-parallel ranks: each has a run of a micro-batch's rows, and in attention all rows of some heads. cp
    divides the key heads that `tp` leaves a rank; not with `sequence_parallel`."""
    ep: int = Field(default=1, ge=1)
    """Expert-parallel ranks, among the replicas: each holds as many of every layer's experts, and rows travel to them.
    ep divides the experts and dp, and dp divides `train.micro_batches`."""
    fsdp: int = Field(default=0, ge=0, le=3)
    """What is sharded over dp (ZeRO): 0 nothing, 1 the optimizer's moments, 2 gradients too, each layer's exchanged
    after every micro-batch, 3 weights too, each layer's gathered for its forward and again for its backward. 2 and 3
    need a number of micro-batches that dp divides."""
    bucket_mb: int = Field(default=BUCKET_MB, ge=1)
    """Gradients that travel over dp as one message while the backward pass goes on, in units of 2^20 bytes: fewer
    messages against less that is left when it ends. For `fsdp` 0 and 1; 2 and 3 exchange layer by layer."""
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
    offload_layers: int = Field(default=0, ge=0)
    """How many layers of each stage, after those that are recomputed, have what they keep for the backward pass moved
    away until then: to the host's memory from an accelerator, to a file (`offload_dir`) where a CPU is the device."""
    offload_per_stage: Annotated[tuple[int, ...], BeforeValidator(_as_tuple)] = ()
    """Instead of `offload_layers`: a number for each pipeline stage."""
    offload_dir: str | None = None
    """Where a CPU's offloaded activations go, in a file without a name for each process, as large as the most that is
    away at once: a directory on a fast disk, not in memory (tmpfs). None: the run's `train.out`."""
