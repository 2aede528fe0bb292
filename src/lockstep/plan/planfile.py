"""A plan as a value: what was asked, the layout, what is predicted; to and from ``plan.yaml``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import LockstepError
from lockstep.plan.layout import PER_STAGE, Batch, Layout
from lockstep.plan.predict import Prediction
from lockstep.plan.shape import ModelShape

_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """One strategy. ``worse``: against the best plan of the same search, in words (empty for the best)."""

    model: ModelShape
    cluster: str
    batch: Batch
    layout: Layout
    prediction: Prediction
    worse: str = ""

    def save(self, path: str | Path) -> None:
        """Write ``plan.yaml``. Raises LockstepError where that is not possible."""
        try:
            Path(path).write_text(self.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise LockstepError(f"cannot write the plan to {path}: {error.strerror}. Choose another --out.") from error

    def to_yaml(self) -> str:
        """The file's text: plain numbers, readable, with the predicted values for comparison."""
        content = {
            "plan": _VERSION,
            "model": asdict(self.model),
            "cluster": self.cluster,
            "batch": asdict(self.batch),
            "layout": self.layout.as_dict(),
            "micro_batches": self.layout.micro_batches(self.batch),
            "predicted": _rounded(asdict(self.prediction)),
        }
        return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110)


def load_plan(path: str | Path) -> Plan:
    """Read ``plan.yaml``. Raises LockstepError if it is no plan of this version or was altered by an unknown key."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise LockstepError(
            f"plan file {path} does not exist: `lockstep plan MODEL --cluster ...` writes one."
        ) from error
    except yaml.YAMLError as error:
        raise LockstepError(f"plan file {path} is not YAML: {error}") from error
    if not isinstance(content, dict) or content.get("plan") != _VERSION:
        raise LockstepError(f"plan file {path}: expected `plan: {_VERSION}` in it; write it anew with `lockstep plan`.")
    try:
        layout = dict(content["layout"])
        layout |= {name: tuple(layout.get(name, ())) for name in PER_STAGE}
        return Plan(
            ModelShape(**content["model"]),
            str(content["cluster"]),
            Batch(**content["batch"]),
            Layout(**layout),
            Prediction(**content["predicted"]),
        )
    except (KeyError, TypeError) as error:
        raise LockstepError(f"plan file {path} is incomplete or has an unknown key: {error}. Write it anew.") from error


def check_model(plan: Plan, shape: ModelShape) -> None:
    """Raise LockstepError if the plan was made for another model, saying what differs."""
    differs = [
        f"{field.name} {getattr(plan.model, field.name)} in the plan, {getattr(shape, field.name)} in the model"
        for field in fields(ModelShape)
        if field.name != "name" and getattr(plan.model, field.name) != getattr(shape, field.name)
    ]
    if differs:
        raise LockstepError(
            f"this plan is for another model: {'; '.join(differs)}. Make a plan for this model with `lockstep plan`."
        )


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value
