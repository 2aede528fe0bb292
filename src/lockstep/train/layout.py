"""From the configuration's layout to this rank's part of the model, or the reason why it cannot be."""

from __future__ import annotations

from lockstep.config import Config, ModelConfig
from lockstep.config.parallel import ParallelConfig
from lockstep.errors import LockstepError, NotRunError
from lockstep.memory.layers import LayerPolicy
from lockstep.ops.device_class import BF16_CLASS, device_class
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
    _check_pairs_of_rows(config)
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
    return Partition(shape, mesh, table, stages, sequence_parallel=rows, shard_weights=weights)


def _check_pairs_of_rows(config: Config) -> None:
    """Refuse context parallelism where a weight's gradient goes by pairs of rows (`ops/csrc/steps.h`): a rank's run of
    them may begin between the two of a pair, and then its bits are not those of one process."""
    train, cp = config.train, config.parallel.cp
    if cp > 1 and train.dtype == "bfloat16" and train.numerics == "bitwise" and device_class() == BF16_CLASS:
        raise NotRunError(
            f"parallel.cp is {cp}: on this processor ({BF16_CLASS}) gradients in bfloat16 go by pairs of rows, and a "
            "rank's share may begin in the middle of one. Set parallel.cp to 1 or train.dtype to float32, or keep the "
            "processor in class cpu-fma with ATEN_CPU_CAPABILITY=avx2 in the environment"
        )


def layer_policy(parallel: ParallelConfig, stage: int) -> LayerPolicy:
    """What a stage recomputes, and what it offloads."""
    again = parallel.recompute_per_stage[stage] if parallel.recompute_per_stage else parallel.recompute_layers
    away = parallel.offload_per_stage[stage] if parallel.offload_per_stage else parallel.offload_layers
    return LayerPolicy("full" if parallel.recompute == "full" else "none", again, away)
