"""A configuration with the layout and the batch of a plan: what `lockstep train --plan` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.config import Config, ModelConfig
from lockstep.config.check import check
from lockstep.errors import NotRunError
from lockstep.parallel.rules import known_shape
from lockstep.plan import check_model, load_plan
from lockstep.plan.decoder_config import planner_shape


def planned(config: Config, file: Path) -> Config:
    """The configuration with ``parallel`` and the global batch as the plan has them.

    The plan's micro-batches become the canonical ones, so the same plan gives the same bits on any layout of it.
    Raises LockstepError for a plan of another model (what differs) or with what this version does not run.
    """
    plan = load_plan(file)
    shape = known_shape(config.model) or _loaded(config.model)
    check_model(plan, planner_shape(shape))
    layout, batch = plan.layout, plan.batch
    if layout.tp > 1 and (shape.num_experts or shape.kv_lora_rank):
        raise NotRunError(
            f"{file}: tp is {layout.tp}: layers with experts or latent attention are not cut by tensor parallelism in "
            "this version; make the plan with --pin tp=1"
        )
    degrees = {key: getattr(layout, key) for key in ("pp", "dp", "cp", "tp", "ep", "fsdp")}
    kept = ("schedule", "recompute", "recompute_layers", "offload_layers", "bucket_mb")
    choices = {key: getattr(layout, key) for key in kept}
    choices["sequence_parallel"] = layout.sequence_parallel and layout.tp > 1
    tree: dict[str, Any] = config.model_dump()
    tree["parallel"] |= degrees | choices | {
        "chunks": layout.chunks if layout.schedule == "interleaved" else None,
        "layers_per_stage": list(layout.layers_per_stage) if layout.pp > 1 else [],
        "recompute_per_stage": list(layout.recompute_per_stage),
        "offload_per_stage": list(layout.offload_per_stage),
    }  # fmt: skip
    tree["train"] |= {"micro_batch": layout.micro_batch, "micro_batches": batch.sequences // layout.micro_batch}
    tree["data"] |= {"seq_len": batch.seq}
    if max(shape.canonical_tp, config.train.canonical_tp or 1) < layout.tp:
        tree["train"]["canonical_tp"] = layout.tp
    return check(Config, tree, str(file))


def _loaded(model: str | ModelConfig) -> ModelConfig:
    """Of a model that only loading tells of."""
    from lockstep.model import load

    assert isinstance(model, str), "a description is known"
    return load(model, numerics="fast").config
