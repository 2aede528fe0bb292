"""A plan as a value: what was asked, the layout, what is predicted; to and from ``plan.yaml``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from lockstep.errors import LockstepError
from lockstep.plan.layout import Batch, Layout, check_layout
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
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LockstepError(f"plan file {path} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict) or content.get("plan") != _VERSION:
        raise LockstepError(f"plan file {path}: expected `plan: {_VERSION}` in it; write it anew with `lockstep plan`.")
    try:
        model, layout, batch = (_section(kind, key, content, path) for key, kind in _SECTIONS.items())
        check_layout(layout, model, batch, layout.devices)
        if not isinstance(predicted := content["predicted"], dict):
            raise LockstepError(f"plan file {path}: predicted is {predicted!r}, expected a mapping. Write it anew.")
        return Plan(model, str(content["cluster"]), batch, layout, Prediction(**predicted))
    except (KeyError, TypeError) as error:
        raise LockstepError(f"plan file {path} is incomplete or has an unknown key: {error}. Write it anew.") from error


_AT_LEAST_ONE = (
    "pp", "dp", "cp", "tp", "ep", "micro_batch", "bucket_mb", "chunks", "sequences", "seq", "layers", "heads", "hidden"
)  # fmt: skip
_SECTIONS: dict[str, Any] = {"model": ModelShape, "layout": Layout, "batch": Batch}


def _section(kind: Any, key: str, content: dict[str, Any], path: str | Path) -> Any:
    """A part of the file as a value, every field of its type: a file may have been changed by hand."""
    given = content[key]
    if not isinstance(given, dict):
        raise LockstepError(f"plan file {path}: {key} is {given!r}, expected a mapping. Write it anew.")
    unknown = [name for name in given if name not in {field.name for field in fields(kind)}]
    if unknown:
        raise LockstepError(f"plan file {path}: {key} has an unknown key {unknown[0]!r}. Write it anew.")
    try:
        value = TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, (key, *first["loc"])))
        raise LockstepError(
            f"plan file {path}: {name} is {first['input']!r}: {first['msg']}. Change it, or write the plan anew."
        ) from error
    for name in _AT_LEAST_ONE:
        if getattr(value, name, 1) < 1:
            raise LockstepError(f"plan file {path}: {key}.{name} is {getattr(value, name)}, expected at least 1.")
    return value


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
