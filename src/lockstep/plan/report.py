"""Plans as text for a person: the best one with its parts, and why the next ones are worse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from lockstep.plan.cluster import Cluster, cluster_of
from lockstep.plan.layout import PER_STAGE, Layout
from lockstep.plan.planfile import Plan
from lockstep.plan.predict import Prediction
from lockstep.quantities import counted, duration, parameters, size

TERMS = (
    "MFU: FLOPs that the model needs (none for recomputation) over what the devices' peak rate makes in a step",
    "bubble: the share of the whole step in which the busiest stage waits for others",
    "communication: what of it nothing hides; memory: of the fullest rank, at its fullest moment",
)
"""What the words of a report mean."""
_SMALL = 0.0005
_TIGHT, _ROOMY = 0.02, 0.05
"""A plan is told to be tight that leaves a smaller share of the memory, and another named that leaves a larger one."""


def report(plans: Sequence[Plan], cluster: str | Cluster) -> str:
    """The text that `lockstep plan` prints; ``plans`` as ``search`` returns them for ``cluster``, at least one."""
    best, place = plans[0], cluster_of(cluster)
    room, count = place.device.capacity / 1e9, best.layout.micro_batches(best.batch)
    lines = [
        f"{best.model.name}: {parameters(best.model.parameters)} parameters on {best.cluster}, "
        f"{counted(best.batch.sequences, 'sequence')} of {counted(best.batch.seq, 'token')} per step",
        "",
        f"best  {best.layout.describe()}, {counted(count, 'micro-batch')}",
        *_details(best, room),
    ]
    if len(plans) > 1:
        lines += ["", "next"]
    for rank, plan in enumerate(plans[1:], start=2):
        lines += [f"{rank:3d}.  {plan.layout.describe()}", f"      {plan.worse}", *_details(plan, room)]
    return "\n".join([*lines, *(f"\n{line}" for line in tight(plans, place)), "", *TERMS])


def tight(plans: Sequence[Plan], cluster: Cluster) -> list[str]:
    """Lines that say how close the best plan is to the memory's limit, and what leaves more; none where it isn't."""
    best, room = plans[0], cluster.device.capacity / 1e9
    free = room - best.prediction.memory_gb
    if free >= _TIGHT * room:
        return []
    full = cluster.device.memory_gb * 2**30 / 1e9
    said = (
        f"The best plan leaves {free:.1f} of {room:.1f} GB ({100 * free / room:.1f} %) free. Counted in are "
        f"{best.prediction.memory_parts['margin']:.1f} GB that an allocator may lose (margin), and the other "
        f"{full - room:.1f} GB of a device's {full:.1f} are left alone. `lockstep dryrun --plan` counts a rank "
        "tensor by tensor."
    )
    for rank, plan in enumerate(plans[1:], start=2):
        held = plan.prediction.memory_gb
        if held <= (1 - _ROOMY) * room:
            pinned = " ".join(f"--pin {key}={value}" for key, value in as_pins(plan.layout).items())
            slower = 100 * (plan.prediction.step_s / best.prediction.step_s - 1)
            return [f"{said} For more room take plan {rank} ({held:.1f} GB, {slower:.1f} % slower): {pinned}"]
    return [f"{said} {_ways(best.layout)}"]


def as_pins(layout: Layout) -> dict[str, str]:
    """Pins with which a search finds this layout and no other: all degrees, and what it saves memory with."""
    keys = ["pp", "dp", "cp", "tp", "ep", "fsdp", "micro_batch"]
    keys += ["schedule", "chunks"] if layout.pp > 1 else []
    keys += ["recompute"]
    keys += ["recompute_layers"] if layout.recompute != "full" and not layout.recompute_per_stage else []
    keys += ["offload_layers"] if layout.recompute != "full" and not layout.offload_per_stage else []
    keys += [key for key in PER_STAGE if getattr(layout, key)]
    said = {key: getattr(layout, key) for key in keys}
    return {key: ",".join(map(str, value)) if isinstance(value, tuple) else str(value) for key, value in said.items()}


def _ways(layout: Layout) -> str:
    """Which pins make the layout leaner."""
    ways = [f"--pin micro_batch={layout.micro_batch // 2}"] if layout.micro_batch > 1 else []
    ways += ["--pin recompute=full"] if layout.recompute != "full" else []
    ways += [f"--pin fsdp={layout.fsdp + 1}"] if layout.fsdp < 3 and layout.dp > 1 else []
    return f"For more room: {' or '.join(ways)}" if ways else "For more room take more devices"


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
