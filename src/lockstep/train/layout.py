"""From the configuration's layout to this rank's part of the model, or the reason why it cannot be."""

from __future__ import annotations

import torch

from lockstep.config import Config, ModelConfig
from lockstep.config.parallel import ParallelConfig
from lockstep.errors import LockstepError
from lockstep.memory.layers import LayerPolicy
from lockstep.ops.linear import rows_together
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.partition import Partition
from lockstep.parallel.rules import check_layout, keeps_all, pipeline_of


def partition(config: Config, shape: ModelConfig, mesh: Mesh) -> Partition | None:
    """This rank's part of a model of this shape; None where one process trains it in the plain way.

    Raises LockstepError for a layout that does not fit the processes, the model, the batch or this version.
    """
    parallel = config.parallel
    check_layout(config, shape)
    asked = MeshShape.of(parallel)
    asked.check_world(mesh.shape.size)
    if asked != mesh.shape:
        raise LockstepError(
            f"parallel asks for {asked.describe()}, but the mesh that was given is {mesh.shape.describe()}"
        )
    if mesh.shape.size == 1 and keeps_all(parallel) and shape.canonical_tp == 1:
        return None
    table, stages = pipeline_of(config, shape, mesh["dp"].index)
    rows, weights = parallel.sequence_parallel, parallel.fsdp > 2
    step = rows_together(getattr(torch, config.train.dtype))
    return Partition(shape, mesh, table, stages, sequence_parallel=rows, shard_weights=weights, row_step=step)


def layer_policy(parallel: ParallelConfig, stage: int) -> LayerPolicy:
    """What a stage recomputes, and what it offloads."""
    again = parallel.recompute_per_stage[stage] if parallel.recompute_per_stage else parallel.recompute_layers
    away = parallel.offload_per_stage[stage] if parallel.offload_per_stage else parallel.offload_layers
    return LayerPolicy("full" if parallel.recompute == "full" else "none", again, away)
