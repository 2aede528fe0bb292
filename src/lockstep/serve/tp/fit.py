"""Which models several processes can serve together, and how each is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.config.model import ModelConfig
from lockstep.errors import LockstepError
from lockstep.ops import Numerics
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.partition import Partition
from lockstep.parallel.schedules import schedule
from lockstep.parallel.stages import stages_of
from lockstep.serve.tp.gathered import Gathered

if TYPE_CHECKING:
    from lockstep.model import Model, PackedCache

ServedPart = Partition | Gathered
"""A rank's part: in canonical segments whose products are summed, or by outputs that are gathered."""


def fitted(config: ModelConfig, tp: int, numerics: Numerics) -> ModelConfig:
    """The configuration that ``tp`` processes serve: the model's own, whose `canonical_tp` says how sums are made.

    With `numerics: fast`, which promises no bits, sums are made over the processes wherever that can be. Raises
    LockstepError for a model that does not divide, with what to change.
    """
    if in_segments(config, tp):
        return config
    even = tp & (tp - 1) == 0 and config.num_kv_heads % tp == config.intermediate_size % tp == 0
    plain = not config.num_experts and config.kv_lora_rank is None
    if numerics == "fast" and config.canonical_tp == 1 and even and plain:
        return config.model_copy(update={"canonical_tp": tp})
    dense = not config.num_experts or config.dense_layers > 0
    repeated = config.kv_lora_rank is not None or tp % config.num_kv_heads == 0
    wrong = (
        (config.num_heads % tp, f"{config.num_heads} attention heads"),
        (config.num_kv_heads % tp and not repeated, f"{config.num_kv_heads} key heads (or be a multiple of them)"),
        (dense and config.intermediate_size % tp, f"width of its MLP, {config.intermediate_size}"),
        (config.hidden_size % tp, f"hidden size, {config.hidden_size}"),
        (config.num_experts % tp, f"{config.num_experts} experts"),
    )
    for remainder, what in wrong:
        if remainder:
            raise LockstepError(
                f"tp is {tp}: it must divide the model's {what}; choose another, or serve it with tp 1; several "
                "engines side by side are --replicas."
            )
    return config


def in_segments(config: ModelConfig, tp: int) -> bool:
    """Whether the model's `canonical_tp` lets ``tp`` processes share its sums."""
    return config.canonical_tp % tp == 0


def partition(config: ModelConfig, mesh: Mesh, numerics: Numerics) -> ServedPart:
    """What this rank of the mesh holds: its slices of every layer. Raises what `fitted` raises."""
    config = fitted(config, mesh.shape.tp, numerics)
    if not in_segments(config, mesh.shape.tp):
        return Gathered(config, mesh)
    table = schedule("1f1b", 1, 1)
    return Partition(config, mesh, table, stages_of(config.num_layers, table, config.tie_embeddings), shared_head=True)


def load_part(
    path: str, mesh: Mesh, dtype: str, numerics: Numerics, packed: PackedCache | None
) -> tuple[Model, ServedPart]:
    """This rank's part of a model on disk: it reads its own slices from the mapped files, or from the cache."""
    from lockstep.model import load

    parts: list[ServedPart] = []

    def cut(config: ModelConfig) -> ServedPart:
        parts.append(partition(config, mesh, numerics))
        return parts[-1]

    return load(path, dtype=dtype, numerics=numerics, packed=packed, part=cut), parts[0]
