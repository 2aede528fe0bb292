"""Plans that `lockstep train --plan` runs as they are, and what the search would choose beyond them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.plan.candidates import Pins
from lockstep.plan.cluster import Cluster
from lockstep.plan.layout import Layout
from lockstep.plan.named_shape import model_shape
from lockstep.plan.planfile import Plan
from lockstep.plan.search import search
from lockstep.plan.shape import ModelShape


def not_run(layout: Layout, shape: ModelShape) -> list[str]:
    """What of a layout this version's trainer refuses, in words."""
    found = [
        (layout.cp > 1 and not _contexts(layout, shape), f"such context parallelism (cp {layout.cp})"),
        (layout.tp > 1 and _uncut(shape), f"tensor parallelism of experts or latent attention (tp {layout.tp})"),
        (
            layout.tp > 1 and not _uncut(shape) and not _segments(layout.tp, shape),
            f"tp {layout.tp} (a power of two that divides {shape.kv_heads} key heads and {shape.intermediate} columns)",
        ),
        (shape.states == "mixed" or not shape.gated or shape.positions > 0, f"a model like {shape.name}"),
    ]
    return [words for refused, words in found if refused]


def _contexts(layout: Layout, shape: ModelShape) -> bool:
    """Whether the trainer runs the layout's context parallelism."""
    twice = layout.sequence_parallel and layout.tp > 1
    return not _uncut(shape) and not twice and shape.kv_heads % (layout.tp * layout.cp) == 0


def _segments(tp: int, shape: ModelShape) -> bool:
    """Whether the trainer's sums over ranks can be made of ``tp`` segments (``canonical_tp``)."""
    return tp & (tp - 1) == 0 and shape.kv_heads % tp == 0 and shape.intermediate % tp == 0


def _uncut(shape: ModelShape) -> bool:
    return bool(shape.experts or shape.kv_lora_rank)


@dataclass(frozen=True)
class Found:
    """plans: the best that the trainer runs or, where none of those fits (or pins ask for others), the best of all.
    beyond: the best of all, where it is faster and the trainer does not run it."""

    plans: list[Plan]
    beyond: Plan | None = None

    @property
    def note(self) -> str:
        """One line about what is not run; empty where everything is."""
        best = self.plans[0]
        if refused := not_run(best.layout, best.model):
            return f"`lockstep train` does not run {', '.join(refused)} in this version, and no plan without was found."
        if self.beyond is None:
            return ""
        refused = not_run(self.beyond.layout, self.beyond.model)
        faster = 100 * (1 - self.beyond.prediction.step_s / best.prediction.step_s)
        return (
            f"with {', '.join(refused)}, which `lockstep train` does not run in this version, a step would take "
            f"{self.beyond.prediction.step_s:.3g} s ({faster:.0f} % less): {self.beyond.layout.describe()}"
        )


def search_to_run(
    model: str | Path | ModelShape, cluster: str | Cluster, *, pins: Pins | None = None, **asked: Any
) -> Found:
    """`search` among what the trainer runs. asked: the other arguments of `search`."""
    shape = model_shape(model)
    best = search(shape, cluster, pins=pins, **asked)
    if not any(not_run(plan.layout, shape) for plan in best):
        return Found(best)
    without: dict[str, Any] = {"tp": 1, "cp": 1} if _uncut(shape) else {}
    try:
        runs = search(shape, cluster, pins={**without, **(pins or {})}, **asked)
    except LockstepError:
        return Found(best)
    if not_run(runs[0].layout, shape):
        return Found(best)
    return Found(runs, best[0] if not_run(best[0].layout, shape) else None)
