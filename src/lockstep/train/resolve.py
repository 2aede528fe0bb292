"""The arguments of `Trainer`, made into one configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.config import Config
from lockstep.config.check import check
from lockstep.errors import LockstepError
from lockstep.model.model import Model


def resolve(
    config: Config | Model, data: str | Sequence[str] | None, sections: Mapping[str, Mapping[str, Any]]
) -> tuple[Config, Model | None]:
    """The configuration with the given sections' keys on top, and the model if one was given."""
    given = config if isinstance(config, Model) else None
    if given is None and not isinstance(config, Config):
        raise LockstepError(f"Trainer: expected a Config or a Model, found {type(config).__name__}")
    tree: dict[str, Any] = {"model": given.config.model_dump()} if given is not None else config.model_dump()  # type: ignore[union-attr]
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys}
    if data is not None:
        tree.setdefault("data", {})["sources"] = [data] if isinstance(data, str) else list(data)
    return check(Config, tree, "Trainer"), given
