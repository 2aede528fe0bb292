"""Plans that `lockstep train --plan` runs as they are, and what the search would choose beyond them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.config import Config, ModelConfig
from lockstep.config.check import check
from lockstep.errors import LockstepError
from lockstep.parallel.rules import check_run, known_shape
from lockstep.plan.cluster import Cluster
from lockstep.plan.decoder_config import planner_shape
from lockstep.plan.layout import Layout
from lockstep.plan.named_shape import model_shape
from lockstep.plan.pins import Pins
from lockstep.plan.planfile import Plan, check_model
from lockstep.plan.search import compared, different, plans_that_fit, search
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
        (bool(why := _untrained(shape)), f"a model like {shape.name} ({why})"),
    ]
    return [words for refused, words in found if refused]


def _untrained(shape: ModelShape) -> str:
    """What of a model the trainer does not train on any layout, in words; empty where it trains it."""
    found = [
        (shape.states == "mixed", "states: mixed"),
        (not shape.gated, "gated: false, an MLP without a gate, as it is where a description does not say gated: true"),
        (shape.positions > 0, f"positions: {shape.positions}, learned ones"),
        (shape.head_dim % 2 > 0, f"head_dim: {shape.head_dim}, which is odd"),
        (shape.qk_rope_head_dim % 2 > 0, f"qk_rope_head_dim: {shape.qk_rope_head_dim}, which is odd"),
    ]
    return "; ".join(words for refused, words in found if refused)


def _contexts(layout: Layout, shape: ModelShape) -> bool:
    """Whether the trainer runs the layout's context parallelism."""
    twice = layout.sequence_parallel and layout.tp > 1
    return not _uncut(shape) and not twice and shape.kv_heads % (layout.tp * layout.cp) == 0


def _segments(tp: int, shape: ModelShape) -> bool:
    """Whether the trainer's sums over ranks can be made of ``tp`` segments (``canonical_tp``)."""
    return tp & (tp - 1) == 0 and shape.kv_heads % tp == 0 and shape.intermediate % tp == 0


def _uncut(shape: ModelShape) -> bool:
    return bool(shape.experts or shape.kv_lora_rank)


def with_plan(config: Config, shape: ModelConfig, plan: Plan, source: str) -> Config:
    """The configuration with ``parallel`` and the global batch as the plan has them; shape: the configuration's model.

    The plan's micro-batches become the canonical ones, so the same plan gives the same bits on any layout of it.
    Raises LockstepError for a plan of another model (what differs). source: names the plan in errors.
    """
    check_model(plan, planner_shape(shape))
    layout, batch = plan.layout, plan.batch
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
    each, groups = batch.sequences // layout.micro_batch, layout.gradient_groups or None
    tree["train"] |= {"micro_batch": layout.micro_batch, "micro_batches": each, "gradient_groups": groups}
    tree["data"] |= {"seq_len": batch.seq}
    if max(shape.canonical_tp, config.train.canonical_tp or 1) < layout.tp:
        tree["train"]["canonical_tp"] = layout.tp
    return check(Config, tree, source)


def refused(plan: Plan, run: Config | None = None) -> str:
    """Why `lockstep train` does not run a plan in this version, as a clause; empty where it does. run: whose model it
    is, with all else that it asks for."""
    if words := not_run(plan.layout, plan.model):
        return f"does not run {', '.join(words)} in this version"
    shape = None if run is None else known_shape(run.model)
    if run is None or shape is None:
        return ""
    try:
        check_run(with_plan(run, shape, plan, "the plan"))
    except LockstepError as error:
        return f"refuses it: {error}"
    return ""


@dataclass(frozen=True)
class Found:
    """plans: the best that the trainer runs or, where none of those fits (or pins ask for others), the best of all.
    why: it refuses the best. beyond: the best of all and why that is refused, where it is faster."""

    plans: list[Plan]
    why: str = ""
    beyond: tuple[Plan, str] | None = None

    @property
    def note(self) -> str:
        """One line about what is not run; empty where everything is."""
        if self.why:
            return f"`lockstep train` {self.why.rstrip('.')}; no plan that it runs was found."
        if self.beyond is None:
            return ""
        plan, why = self.beyond
        faster = 100 * (1 - plan.prediction.step_s / self.plans[0].prediction.step_s)
        return (
            f"a step would take {plan.prediction.step_s:.3g} s ({faster:.0f} % less) with {plan.layout.describe()}, "
            f"but `lockstep train` {why}"
        )


def search_to_run(
    model: str | Path | ModelShape,
    cluster: str | Cluster,
    *,
    pins: Pins | None = None,
    top: int = 5,
    run: Config | None = None,
    **asked: Any,
) -> Found:
    """`search` among what the trainer runs. run: the configuration that the plan is for, where there is one; asked: the
    other arguments of `search`."""
    shape = model_shape(model)
    best = search(shape, cluster, pins=pins, top=top, **asked)
    reasons = [refused(plan, run) for plan in best]
    if not any(reasons):
        return Found(best)
    simpler = {**_simpler(shape, run), **(pins or {})}
    try:
        more = islice(plans_that_fit(shape, cluster, pins=simpler, **asked), _LOOKED_AT)
        runs = list(islice(different(plan for plan in more if not refused(plan, run)), top))
    except LockstepError:
        runs = []
    why = reasons[0]
    if not runs:
        return Found(best, why)
    # Among fewer plans the search looks closer, and may find a faster one.
    faster = best[0].prediction.step_s < runs[0].prediction.step_s
    beyond = (best[0], why) if why and faster else None
    return Found([runs[0], *(compared(plan, runs[0]) for plan in runs[1:])], "", beyond)


_LOOKED_AT = 20
"""Plans among which those are that the trainer runs."""


def _simpler(shape: ModelShape, run: Config | None) -> dict[str, Any]:
    """Pins that leave out what the trainer does not run for such a model, or in such a run."""
    found: dict[str, Any] = {"tp": 1, "cp": 1} if _uncut(shape) else {}
    if run is not None and run.lora.rank:
        found |= {"tp": 1, "cp": 1, "pp": 1}
    if run is not None and isinstance(run.model, ModelConfig) and run.model.router_aux_loss:
        found |= {"recompute": "none", "recompute_layers": 0, "offload_layers": 0}
    return found
