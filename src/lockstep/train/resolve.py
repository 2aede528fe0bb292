"""The arguments of `Trainer`, made into one configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.config import Config
from lockstep.config.check import check
from lockstep.errors import LockstepError
from lockstep.model import Model
from lockstep.train.schedule import check_schedule, lengths


def resolve(
    config: Config | Model,
    data: str | Sequence[str] | Mapping[str, Any] | None,
    sections: Mapping[str, Mapping[str, Any]],
) -> tuple[Config, Model | None]:
    """The configuration with the given sections' keys on top, and the model if one was given."""
    if isinstance(config, Model):
        given, tree = config, {"model": config.config.model_dump()}
    elif isinstance(config, Config):
        given, tree = None, config.model_dump()
    else:
        raise LockstepError(f"Trainer: expected a Config or a Model, found {type(config).__name__}")
    if isinstance(data, str):
        data = [data]
    own = {} if data is None else data if isinstance(data, Mapping) else {"sources": list(data)}
    for name, keys in {**sections, "data": own}.items():
        tree[name] = {**tree.get(name, {}), **keys}
    return _planned(check(Config, tree, "Trainer")), given


def _planned(config: Config) -> Config:
    """With the schedule's lengths as numbers, so that the saved configuration says what was run."""
    schedule, steps = config.schedule, config.train.steps
    check_schedule(schedule, steps)
    warmup, decay = lengths(schedule, steps)
    return config.model_copy(update={
        "schedule": schedule.model_copy(update={"warmup_steps": warmup, "decay_steps": decay})
    })  # fmt: skip
