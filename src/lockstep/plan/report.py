"""Plans as text for a person: the best one with its parts, and why the next ones are worse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from lockstep.plan.cluster import Cluster, cluster_of
from lockstep.plan.planfile import Plan
from lockstep.plan.predict import Prediction
from lockstep.quantities import duration, parameters, size

_SMALL = 0.0005


def report(plans: Sequence[Plan], cluster: str | Cluster) -> str:
    """The text that `lockstep plan` prints; ``plans`` as ``search`` returns them for ``cluster``, at least one."""
    best, place = plans[0], cluster_of(cluster)
    room, count = place.device.capacity / 1e9, best.layout.micro_batches(best.batch)
    lines = [
        f"{best.model.name}: {parameters(best.model.parameters)} parameters on {best.cluster}, "
        f"{best.batch.sequences} sequences of {best.batch.seq} tokens per step",
        "",
        f"best  {best.layout.describe()}, {count} micro-batch{'es' * (count > 1)}",
        *_details(best, room),
    ]
    if len(plans) > 1:
        lines += ["", "next"]
    for rank, plan in enumerate(plans[1:], start=2):
        lines += [f"{rank:3d}.  {plan.layout.describe()}", f"      {plan.worse}", *_details(plan, room)]
    lines += ["", "communication: what of it nothing hides; memory: of the fullest rank, at its fullest moment"]
    return "\n".join(lines)


def _details(plan: Plan, room: float) -> Iterator[str]:
    """A plan's numbers, and what each stage of its pipeline has."""
    layout, found = plan.layout, plan.prediction
    yield f"      {_summary(found, room)}"
    yield f"      time    {_breakdown(found.parts, found.step_s, duration)}"
    yield f"      memory  {_breakdown(found.memory_parts, found.memory_gb, _gigabytes)}"
    by_stage = {
        "layers": layout.layers_per_stage,
        "recomputed": layout.recompute_per_stage if any(layout.recomputed) else (),
        "offloaded": layout.offload_per_stage if any(layout.offloaded) else (),
        "GB": tuple(f"{held:.1f}" for held in found.stage_memory_gb),
    }
    for name, counts in by_stage.items():
        if len(counts) > 1:
            yield f"      {name} per stage: {' '.join(map(str, counts))}"


def _summary(found: Prediction, room: float) -> str:
    bubble = f"bubble {100 * found.bubble:.1f} %" + (" (simulated)" if found.simulated else "")
    return (
        f"step {duration(found.step_s)}, {found.tokens_s:,.0f} tokens/s, MFU {100 * found.mfu:.1f} %, {bubble}, "
        f"memory {found.memory_gb:.1f} of {room:.1f} GB"
    )


def _gigabytes(value: float) -> str:
    return size(value * 1e9)


def _breakdown(parts: Mapping[str, float], whole: float, said: Callable[[float], str]) -> str:
    """The parts that count, largest first."""
    shown = [(name, value) for name, value in parts.items() if value > _SMALL * whole]
    ordered = sorted(shown, key=lambda item: -item[1])
    return ", ".join(f"{name} {said(value)}" for name, value in ordered)
