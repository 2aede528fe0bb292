"""Which layouts this version trains: what is refused, and with which words, before any process starts.

Imports no torch: a mistake in a layout is told at once. The ranks check again, as they may be started by others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.config import Config, ModelConfig
from lockstep.config.check import check as check_section
from lockstep.config.parallel import ParallelConfig
from lockstep.config.train import TrainConfig
from lockstep.errors import LockstepError, NotRunError
from lockstep.model.files import read_json
from lockstep.model.hf_config import read_config
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.schedules import Table, check, load_table, schedule
from lockstep.parallel.stages import Stages, stages_of
from lockstep.parallel.tree import spread


def check_run(config: Config) -> None:
    """Raise LockstepError for a layout that the ranks of this run would refuse. A model that only loading tells of (a
    GGUF file, an alias, an adapter) is left to them."""
    shape = known_shape(config.model)
    if shape is None:
        return
    shape = with_segments(config, shape)
    check_layout(config, shape)
    if MeshShape.of(config.parallel).size > 1:
        for replica in {0, config.parallel.dp - 1}:  # the one with the most micro-batches, and with the fewest
            pipeline_of(config, shape, replica)


def known_shape(model: str | ModelConfig) -> ModelConfig | None:
    """What is told of a model without loading it: its description, or the config.json of its directory."""
    if isinstance(model, ModelConfig):
        return model
    file = Path(model).expanduser() / "config.json"
    return read_config(read_json(file), str(file)) if file.is_file() else None


def with_segments(config: Config, shape: ModelConfig) -> ModelConfig:
    """The shape with the segments that `train.canonical_tp` asks for."""
    if config.train.canonical_tp is None:
        return shape
    tree = {**shape.model_dump(), "canonical_tp": config.train.canonical_tp}
    return check_section(ModelConfig, tree, "train.canonical_tp")


def pipeline_of(config: Config, shape: ModelConfig, replica: int) -> tuple[Table, Stages]:
    """The schedule of a replica's micro-batches, and the layers of its stages."""
    table = _table(config.parallel, len(micro_batches_of(config.parallel, config.train, replica)))
    stages = stages_of(shape.num_layers, table, shape.tie_embeddings, config.parallel.layers_per_stage)
    _check_layers(config.parallel, table, stages)
    return table, stages


def micro_batches_of(parallel: ParallelConfig, train: TrainConfig, replica: int) -> range:
    """The canonical micro-batches that a replica works on: whole groups, neighbours; or where gradients are sharded as
    they are made every dp-th micro-batch, so that all replicas work on neighbours at the same time."""
    if parallel.fsdp >= 2:
        return range(replica, train.micro_batches, parallel.dp)
    groups, size = spread(train.groups, parallel.dp)[replica], train.group_size
    return range(groups.start * size, groups.stop * size)


def _table(parallel: ParallelConfig, micro_batches: int) -> Table:
    """A schedule by name, or a table that was saved in a file."""
    if not parallel.schedule.endswith((".yaml", ".json")):
        return schedule(parallel.schedule, parallel.pp, micro_batches, chunks=parallel.chunks)
    path = Path(parallel.schedule).expanduser()
    if not path.is_file():
        raise LockstepError(f"parallel.schedule: there is no file {path}: give a table that was saved, or a name")
    table = check(load_table(path))
    if (table.stages, table.micro_batches) != (parallel.pp, micro_batches):
        raise LockstepError(
            f"parallel.schedule: the table in {path} has {table.stages} stages and {table.micro_batches} "
            f"micro-batches; this run has parallel.pp {parallel.pp} and {micro_batches} micro-batches in each pipeline"
        )
    return table


def check_layout(config: Config, shape: ModelConfig) -> None:
    """Refuse what this version does not run, and degrees that do not divide."""
    parallel, train = config.parallel, config.train
    check_positions(config, shape)
    _check_contexts(config, shape)
    _check_experts(config, shape)
    _check_balance_loss(config, shape)
    if parallel.fsdp > 1 and train.micro_batches % parallel.dp:
        raise LockstepError(
            f"train.micro_batches is {train.micro_batches}, which parallel.dp {parallel.dp} does not divide: with "
            f"parallel.fsdp {parallel.fsdp} replicas exchange gradients after every micro-batch, so each must have as "
            "many; change train.micro_batches or parallel.dp, or set parallel.fsdp to 1"
        )
    if parallel.fsdp > 2 and config.lora.rank:
        raise LockstepError(
            f"lora.rank {config.lora.rank} with parallel.fsdp 3: the weights that adapters are for are not sharded in "
            "this version; set parallel.fsdp to 2"
        )
    _check_counts(parallel)
    if train.micro_batches < parallel.dp:
        raise LockstepError(
            f"train.micro_batches is {train.micro_batches}, fewer than the {parallel.dp} replicas of parallel.dp: each "
            "takes at least one; raise train.micro_batches (and lower train.micro_batch for the same batch) or lower "
            "parallel.dp"
        )
    if parallel.fsdp < 2 and train.groups < parallel.dp:
        raise LockstepError(
            f"train.gradient_groups is {train.groups}, fewer than the {parallel.dp} replicas of parallel.dp: each "
            "takes whole groups, as a group's gradients are added one after the other in one place. The number is part "
            f"of the run's numerics, which it keeps from its first step: lower parallel.dp to at most {train.groups}, "
            "or set parallel.fsdp to 2, which adds up groups together; a new run may set train.gradient_groups to "
            f"{parallel.dp} or a multiple"
        )
    if parallel.tp & (parallel.tp - 1):
        raise LockstepError(
            f"parallel.tp is {parallel.tp}, which is no power of two: sums that cross ranks are made of a power of two "
            f"of equal segments; set it to {1 << parallel.tp.bit_length() - 1}"
        )
    if shape.canonical_tp % parallel.tp:
        raise LockstepError(
            f"parallel.tp is {parallel.tp}, which does not divide the model's canonical_tp {shape.canonical_tp}: set "
            f"train.canonical_tp to {parallel.tp} or a multiple. It is part of the model's numerics (its sums are made "
            "of so many segments on every layout), so a run keeps it from its first step"
        )
    if config.lora.rank and parallel.pp * parallel.tp > 1:
        raise LockstepError(
            f"lora.rank {config.lora.rank} with parallel.pp {parallel.pp} and parallel.tp {parallel.tp}: adapters "
            "train with data parallelism only in this version; set pp and tp to 1"
        )


def check_positions(config: Config, shape: ModelConfig) -> None:
    """Refuse sequences longer than the model's positions."""
    if config.data.seq_len > shape.max_positions:
        raise LockstepError(
            f"data.seq_len {config.data.seq_len} is longer than the model's max_positions {shape.max_positions}: "
            "lower data.seq_len" + (", or raise model.max_positions" if isinstance(config.model, ModelConfig) else "")
        )


def keeps_all(parallel: ParallelConfig) -> bool:
    """Whether no layer is recomputed or offloaded."""
    counts: Sequence[int] = (
        parallel.recompute_layers, parallel.offload_layers, *parallel.recompute_per_stage, *parallel.offload_per_stage
    )  # fmt: skip
    return parallel.recompute != "full" and not any(counts)


def _check_balance_loss(config: Config, shape: ModelConfig) -> None:
    """Refuse the load-balance loss of experts where it is not trained."""
    alone = MeshShape.of(config.parallel).size == 1 and keeps_all(config.parallel) and shape.canonical_tp == 1
    if shape.router_aux_loss and not alone:
        raise LockstepError(
            f"router_aux_loss is {shape.router_aux_loss}: the load-balance loss of experts is trained by one process "
            "without recomputation in this version; set model.router_aux_loss (router_aux_loss_coef in a config.json) "
            "to 0, or leave out parallel"
        )


def _check_experts(config: Config, shape: ModelConfig) -> None:
    """Refuse expert parallelism that does not divide, or has nothing to spread."""
    parallel, train = config.parallel, config.train
    if parallel.ep == 1:
        return
    if not shape.num_experts:
        raise LockstepError(f"parallel.ep is {parallel.ep}, but the model has no experts: set parallel.ep to 1")
    if shape.num_experts % parallel.ep:
        raise LockstepError(
            f"parallel.ep is {parallel.ep}, which does not divide the model's {shape.num_experts} experts: every rank "
            "holds as many of them; choose a degree that divides both the experts and parallel.dp"
        )
    if train.micro_batches % parallel.dp:
        raise LockstepError(
            f"train.micro_batches is {train.micro_batches}, which parallel.dp {parallel.dp} does not divide: with "
            f"parallel.ep {parallel.ep} replicas send each other rows in every micro-batch, so each must have as many; "
            "change train.micro_batches or parallel.dp, or set parallel.ep to 1"
        )
    if parallel.fsdp < 2 and train.groups % parallel.dp:
        raise LockstepError(
            f"train.gradient_groups is {train.groups}, which parallel.dp {parallel.dp} does not divide: with "
            f"parallel.ep {parallel.ep} replicas send each other rows in every micro-batch, so each must have as many "
            "of its whole groups; change parallel.dp, set parallel.ep to 1 or parallel.fsdp to 2"
        )
    if config.lora.rank:
        raise LockstepError(
            f"lora.rank {config.lora.rank} with parallel.ep {parallel.ep}: adapters train with data parallelism only "
            "in this version; set ep to 1"
        )


def _check_counts(parallel: ParallelConfig) -> None:
    """Refuse lists that are not one number for each stage, and offload of what is never kept."""
    for key in ("recompute_per_stage", "offload_per_stage"):
        counts: tuple[int, ...] = getattr(parallel, key)
        if len(counts) not in (0, parallel.pp) or min(counts, default=0) < 0:
            raise LockstepError(
                f"parallel.{key} is {list(counts)}: give {parallel.pp} numbers of at least 0, one for each stage of "
                "parallel.pp, or leave it out"
            )
    key = "offload_per_stage" if parallel.offload_per_stage else "offload_layers"
    if parallel.recompute == "full" and (parallel.offload_layers or any(parallel.offload_per_stage)):
        raise LockstepError(
            f"parallel.recompute is full, so no layer keeps activations that parallel.{key} could offload: set "
            "parallel.recompute to none, and parallel.recompute_layers to how many of each stage's layers run again "
            f"beside those that are offloaded, or leave {key} out"
        )


def _check_layers(parallel: ParallelConfig, table: Table, stages: Stages) -> None:
    """Refuse more layers recomputed or offloaded than a stage has (lists), or the model (one number)."""
    held = [sum(len(stages.layers[table.group(d, c)]) for c in range(table.chunks)) for d in range(table.stages)]
    for what in ("recompute", "offload"):
        counts: tuple[int, ...] = getattr(parallel, f"{what}_per_stage")
        for stage, (count, layers) in enumerate(zip(counts, held, strict=False)):
            if count > layers:
                raise LockstepError(
                    f"parallel.{what}_per_stage is {list(counts)}, but stage {stage} has {layers} layers: give at most "
                    f"{held}, the layers of each stage"
                )
        if not counts and (count := getattr(parallel, f"{what}_layers")) > sum(held):
            raise LockstepError(
                f"parallel.{what}_layers is {count}, but the model has {sum(held)} layers: give at most {max(held)}, "
                "the layers of the largest stage"
            )


def _check_contexts(config: Config, shape: ModelConfig) -> None:
    """Refuse context parallelism of what has no heads to exchange rows for."""
    parallel, heads = config.parallel, shape.num_kv_heads // config.parallel.tp
    if parallel.cp == 1:
        return
    if shape.num_experts or shape.kv_lora_rank or config.lora.rank:
        raise NotRunError(
            f"parallel.cp is {parallel.cp}: layers with experts or latent attention, and adapters, are not trained "
            "with context parallelism in this version; set it to 1 (with `lockstep plan`: --pin cp=1)"
        )
    if parallel.sequence_parallel and parallel.tp > 1:
        raise NotRunError(
            f"parallel.cp is {parallel.cp} with parallel.sequence_parallel: rows are shared out once in this version, "
            "over cp; set sequence_parallel to false (with `lockstep plan`: --pin sequence_parallel=0)"
        )
    if heads % parallel.cp:
        raise LockstepError(
            f"parallel.cp is {parallel.cp}: in attention each rank takes some of the {heads} key heads that "
            f"parallel.tp {parallel.tp} leaves it, so cp must divide them; lower cp or tp"
        )
