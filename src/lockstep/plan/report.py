"""Plans as text for a person: the best one with its parts, and why the next ones are worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.plan.cluster import Cluster, cluster_of
from lockstep.plan.planfile import Plan
from lockstep.plan.predict import Prediction

_SMALL = 0.0005


def report(plans: Sequence[Plan], cluster: str | Cluster) -> str:
    """The text that `lockstep plan` prints; ``plans`` as ``search`` returns them for ``cluster``, at least one."""
    best, place = plans[0], cluster_of(cluster)
    room = place.device.capacity / 1e9
    lines = [
        f"{best.model.name}: {best.model.parameters / 1e9:.3g} B parameters on {best.cluster}, "
        f"{best.batch.sequences} sequences of {best.batch.seq} tokens per step",
        "",
        f"best  {best.layout.describe()}, {best.layout.micro_batches(best.batch)} micro-batches",
        f"      {_summary(best.prediction, room)}",
    ]
    if cut := best.layout.layers_per_stage:
        lines.append(f"      layers per stage: {' '.join(map(str, cut))}")
    if best.layout.by_stage:
        lines.append(f"      recomputed per stage: {' '.join(map(str, best.layout.recomputed))}")
    if best.layout.offload_per_stage and any(best.layout.offloaded):
        lines.append(f"      offloaded per stage: {' '.join(map(str, best.layout.offloaded))}")
    lines += [
        f"time    {_breakdown(best.prediction.parts, best.prediction.step_s, 's')}",
        f"memory  {_breakdown(best.prediction.memory_parts, best.prediction.memory_gb, 'GB')}",
    ]
    if len(plans) > 1:
        lines += ["", "next"]
    for rank, plan in enumerate(plans[1:], start=2):
        lines += [
            f"{rank:3d}.  {plan.layout.describe()}",
            f"      {_summary(plan.prediction, room)}",
            f"      {plan.worse}",
        ]
    return "\n".join(lines)


def _summary(found: Prediction, room: float) -> str:
    bubble = f"bubble {100 * found.bubble:.1f} %" + (" (simulated)" if found.simulated else "")
    return (
        f"step {found.step_s:.3g} s, {found.tokens_s:,.0f} tokens/s, MFU {100 * found.mfu:.1f} %, {bubble}, "
        f"memory {found.memory_gb:.1f} of {room:.1f} GB"
    )


def _breakdown(parts: Mapping[str, float], whole: float, unit: str) -> str:
    """The parts that count, largest first."""
    shown = [(name, value) for name, value in parts.items() if value > _SMALL * whole]
    ordered = sorted(shown, key=lambda item: -item[1])
    return ", ".join(f"{name} {value:.3g} {unit}" for name, value in ordered)
