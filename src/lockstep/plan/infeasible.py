"""What to say when no layout fits in memory: how much is missing, which knob or which cluster would do."""

from __future__ import annotations

from dataclasses import replace

from lockstep.errors import LockstepError
from lockstep.plan.candidates import candidates
from lockstep.plan.cluster import Cluster, cluster_names, load_cluster
from lockstep.plan.columns import columns
from lockstep.plan.layout import Batch, Layout
from lockstep.plan.memory import memory
from lockstep.plan.pins import Pins, check_pins
from lockstep.plan.shape import ModelShape
from lockstep.quantities import parameters, size

_DOUBLINGS = 10


def cannot_hold(
    shape: ModelShape, cluster: Cluster, batch: Batch, pins: Pins | None, nearest: Layout, needed: float
) -> str:
    """The message for a model that a cluster cannot hold: the nearest layout, what it lacks, and what would hold it."""
    room = cluster.device.capacity
    lines = (
        f"{cluster.name} cannot hold {shape.name} ({parameters(shape.parameters)} parameters): the leanest layout, "
        f"{nearest.describe()}, needs {size(needed)} per device, {size(needed - room)} more than the {size(room)} of "
        f"one {cluster.device.name}. "
    )
    would = _more_devices(shape, cluster, batch, pins) + _other_devices(shape, cluster, batch, pins)
    if not would:
        largest = max((load_cluster(f"{cluster.devices}x{name}") for name in cluster_names()), key=_memory)
        would = _more_devices(shape, largest, batch, pins)
    if pins and _smallest(shape, cluster, batch, None) <= room:
        would.insert(0, "the same cluster without the pins")
    return lines + ("What would: " + ", or ".join(would) + "." if would else "No described cluster would.")


def _more_devices(shape: ModelShape, cluster: Cluster, batch: Batch, pins: Pins | None) -> list[str]:
    """The least that would: a power of two, or twice, four times ... as many."""
    powers = range(_DOUBLINGS + 1)
    power = 1 << cluster.devices.bit_length()
    for count in sorted({power << n for n in powers} | {cluster.devices << n for n in powers[1:]}):
        larger = replace(cluster, devices=count)
        if _smallest(shape, larger, batch, pins) <= cluster.device.capacity:
            return [f"{larger.devices}x{cluster.device.name}"]
    return []


def _other_devices(shape: ModelShape, cluster: Cluster, batch: Batch, pins: Pins | None) -> list[str]:
    """The described device with the least memory that holds the model on as many devices."""
    others = [load_cluster(f"{cluster.devices}x{name}") for name in cluster_names()]
    for other in sorted(others, key=_memory):
        larger = other.device.memory_gb > cluster.device.memory_gb
        if larger and _smallest(shape, other, batch, pins) <= other.device.capacity:
            return [other.name]
    return []


def _memory(cluster: Cluster) -> float:
    return cluster.device.memory_gb


def _smallest(shape: ModelShape, cluster: Cluster, batch: Batch, pins: Pins | None) -> float:
    """Bytes per device of the leanest layout; infinite if nothing factors."""
    try:
        fixed = check_pins(pins or {}, shape, cluster, batch)
        return float(memory(columns(shape, candidates(shape, cluster, batch, fixed), batch)).total.min())
    except LockstepError:
        return float("inf")
