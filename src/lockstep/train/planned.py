"""A configuration with the layout and the batch of a plan: what `lockstep train --plan` runs."""

from __future__ import annotations

from pathlib import Path

from lockstep.config import Config, ModelConfig
from lockstep.errors import NotRunError
from lockstep.parallel.rules import known_shape
from lockstep.plan import load_plan
from lockstep.plan.to_run import with_plan


def planned(config: Config, file: Path) -> Config:
    """The configuration with ``parallel`` and the global batch as the plan has them.

    Raises LockstepError for a plan of another model (what differs) or with what this version does not run.
    """
    plan = load_plan(file)
    shape = known_shape(config.model) or _loaded(config.model)
    found = with_plan(config, shape, plan, str(file))
    if plan.layout.tp > 1 and (shape.num_experts or shape.kv_lora_rank):
        raise NotRunError(
            f"{file}: tp is {plan.layout.tp}: layers with experts or latent attention are not cut by tensor "
            "parallelism in this version; make the plan with --pin tp=1"
        )
    return found


def _loaded(model: str | ModelConfig) -> ModelConfig:
    """Of a model that only loading tells of."""
    from lockstep.model import load

    assert isinstance(model, str), "a description is known"
    return load(model, numerics="fast").config
