"""A plan as a value: what was asked, the layout, what is predicted; to and from ``plan.yaml``."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lockstep.config.strict_yaml import dump
from lockstep.errors import LockstepError
from lockstep.given import instance
from lockstep.plan.layout import Batch, Layout, check_layout
from lockstep.plan.predict import Prediction, check_prediction
from lockstep.plan.shape import ModelShape
from lockstep.plan.typed import is_version, known_keys, typed
from lockstep.plan.yaml_file import read_yaml
from lockstep.quantities import counted

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
        return dump(content, flow=None)


def load_plan(path: str | Path) -> Plan:
    """Read ``plan.yaml``. Raises LockstepError for what is no plan of this version, or one that was changed by hand
    into what cannot be: an unknown key, a wrong type, a layout that suits neither model, batch nor cluster."""
    if not isinstance(path, (str, os.PathLike)):
        raise LockstepError(f"load_plan: path is {path!r:.60}; give the path of a plan.yaml.")
    if not os.path.exists(path):
        raise LockstepError(f"plan file {path} does not exist: `lockstep plan MODEL --cluster ...` writes one.")
    content = read_yaml(path, "plan file")
    if not isinstance(content, dict) or not is_version(content.get("plan"), _VERSION):
        raise LockstepError(f"plan file {path}: expected `plan: {_VERSION}` in it; write it anew with `lockstep plan`.")
    try:
        return _plan(content)
    except LockstepError as error:
        raise LockstepError(f"plan file {path}: {error} Change it, or write the plan anew.") from error


def _plan(content: dict[str, Any]) -> Plan:
    known_keys(content, ("plan", "cluster", "micro_batches", *_SECTIONS), "the file")
    model, layout, batch, predicted = (typed(kind, content.get(key), key) for key, kind in _SECTIONS.items())
    check_layout(layout, model, batch, layout.devices)
    check_prediction(predicted, "predicted")
    cluster = instance(content.get("cluster"), str, "cluster")
    count, _, device = cluster.partition("x")
    if count != str(layout.devices) or not device.strip():
        raise LockstepError(
            f"cluster is {cluster!r:.60}, and the layout takes {counted(layout.devices, 'device')}: a plan is for "
            f"as many as its cluster has, and names them as in {layout.devices}xH100."
        )
    each = layout.micro_batches(batch)
    if content.get("micro_batches", each) != each:
        raise LockstepError(
            f"micro_batches is {content['micro_batches']!r:.60}, but dp {layout.dp} x micro_batch {layout.micro_batch} "
            f"make {each} of the {counted(batch.sequences, 'sequence')}: it follows from batch and layout, so change "
            "those."
        )
    return Plan(model, cluster, batch, layout, predicted)


_SECTIONS: dict[str, Any] = {"model": ModelShape, "layout": Layout, "batch": Batch, "predicted": Prediction}


def check_model(plan: Plan, shape: ModelShape) -> None:
    """Raise LockstepError if the plan was made for another model, saying what differs."""
    instance(plan, Plan, "check_model: plan")
    instance(shape, ModelShape, "check_model: shape")
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
