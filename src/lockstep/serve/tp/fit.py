"""Which models several processes can serve together, and how each is cut."""

from __future__ import annotations

from lockstep.config.model import ModelConfig
from lockstep.errors import LockstepError
from lockstep.ops import Numerics
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.partition import Partition
from lockstep.parallel.schedules import schedule
from lockstep.parallel.stages import stages_of


def fitted(config: ModelConfig, tp: int, numerics: Numerics) -> ModelConfig:
    """The configuration that ``tp`` processes serve: the model's own, whose `canonical_tp` says how sums are made.

    With `numerics: fast`, which promises no bits, a model without the key is cut as well. Raises LockstepError for a
    model that cannot be cut, or not under the bit contract, with what to change.
    """
    instead = "serve it with tp 1; several engines side by side are --replicas"
    if config.num_experts or config.kv_lora_rank is not None:
        what = "latent attention" if config.kv_lora_rank is not None else "layers with experts"
        raise LockstepError(f"tp is {tp}: {what} cannot be cut by tensor parallelism in this version; {instead}.")
    if config.canonical_tp % tp == 0:
        return config
    if tp & (tp - 1) or config.num_kv_heads % tp or config.intermediate_size % tp:
        raise LockstepError(
            f"tp is {tp}: it must be a power of two that divides the model's key heads ({config.num_kv_heads}) and the "
            f"width of its MLP ({config.intermediate_size}); {instead}."
        )
    if numerics == "fast" and config.canonical_tp == 1:
        return config.model_copy(update={"canonical_tp": tp})
    raise LockstepError(
        f"tp is {tp}, which does not divide the model's canonical_tp {config.canonical_tp}: put "
        f'"canonical_tp": {tp} (or a multiple) into its config.json, or train it with train.canonical_tp={tp}. It is '
        "part of the model's numerics: its sums are made of so many segments on any number of processes, so its last "
        "bits become others, the same ones for every tp. Or take --numerics fast, which promises no bits."
    )


def partition(config: ModelConfig, mesh: Mesh, numerics: Numerics) -> Partition:
    """What this rank of the mesh holds: its slices of every layer. Raises what `fitted` raises."""
    config = fitted(config, mesh.shape.tp, numerics)
    table = schedule("1f1b", 1, 1)
    return Partition(config, mesh, table, stages_of(config.num_layers, table, config.tie_embeddings), shared_head=True)
