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
    sections: Mapping[str, Any],
) -> tuple[Config, Model | None]:
    """The configuration with the given sections' keys on top, and the model if one was given. sections: keys
    by section; ``data`` may be what the argument may be, beside it too."""
    if isinstance(config, Model):
        given, tree = config, {"model": config.config.model_dump()}
    elif isinstance(config, Config):
        given, tree = None, config.model_dump()
    else:
        raise LockstepError(f"Trainer: expected a Config or a Model, found {type(config).__name__}")
    own, named = _data(data), _data(sections.get("data"))
    if twice := own.keys() & named.keys():
        raise LockstepError(
            f"Trainer: data gives {', '.join(sorted(twice))} twice, by place and by name: leave one out"
        )
    for name, keys in {**sections, "data": {**own, **named}}.items():
        before = tree.get(name, {})
        if isinstance(keys, Mapping) and not isinstance(before, Mapping):
            raise LockstepError(f"Trainer: {name} is {before!r}, which has no keys to set; found {dict(keys)}")
        tree[name] = {**before, **keys} if isinstance(keys, Mapping) else keys
    return _planned(check(Config, tree, "Trainer")), given


def _data(given: str | Sequence[str] | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Keys of the section: what is no mapping is its sources."""
    if given is None or isinstance(given, Mapping):
        return given or {}
    return {"sources": [given] if isinstance(given, str) else list(given)}


def _planned(config: Config) -> Config:
    """With the schedule's lengths as numbers, so that the saved configuration says what was run."""
    schedule, steps = config.schedule, config.train.steps
    check_schedule(schedule, steps)
    warmup, decay = lengths(schedule, steps)
    return config.model_copy(update={
        "schedule": schedule.model_copy(update={"warmup_steps": warmup, "decay_steps": decay})
    })  # fmt: skip
