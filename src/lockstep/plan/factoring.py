"""What to say when nothing factors: the particular changes, tried out, that would make it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from lockstep.plan.cluster import Cluster
from lockstep.plan.layout import Batch
from lockstep.plan.shape import ModelShape
from lockstep.quantities import counted

Factors = Callable[[Cluster, Batch, Mapping[str, Any]], bool]
"""Whether some layout of these devices, this batch and these pins exists."""
_TRIES = 64


def cannot_factor(
    shape: ModelShape, cluster: Cluster, batch: Batch, pins: Mapping[str, Any], factors: Factors, units: set[int]
) -> str:
    """The message. units: the numbers of sequences that meshes of these devices and pins take at a time, dp x
    micro_batch."""
    said = "".join(f" {_pin(key, value)}" for key, value in pins.items())
    pinned = f" with{said} pinned" if said else ""
    fixes = [
        *_without_a_pin(cluster, batch, pins, factors),
        *_batches(cluster, batch, pins, factors, units),
        *_devices(cluster, batch, pins, factors),
    ]
    return (
        f"{counted(cluster.devices, 'device')} do not factor into pp x dp x cp x tp for {shape.name}{pinned} and "
        f"{counted(batch.sequences, 'sequence')} of {counted(batch.seq, 'token')}. "
        + (f"Any one of these does: {'; '.join(fixes)}." if fixes else f"{_rules(shape, batch)}.")
    )


def _without_a_pin(cluster: Cluster, batch: Batch, pins: Mapping[str, Any], factors: Factors) -> Iterator[str]:
    for key, value in pins.items():
        if factors(cluster, batch, {other: pins[other] for other in pins if other != key}):
            yield f"without the pin {_pin(key, value)}"


def _pin(key: str, value: Any) -> str:
    """As a user writes it."""
    return f"{key}={','.join(map(str, value)) if isinstance(value, tuple) else value}"


def _batches(
    cluster: Cluster, batch: Batch, pins: Mapping[str, Any], factors: Factors, units: set[int]
) -> Iterator[str]:
    """The nearest smaller and the nearest larger number of sequences."""
    now = batch.sequences
    lower = sorted({now // unit * unit for unit in units} - {0, now}, reverse=True)
    upper = sorted({-(-now // unit) * unit for unit in units} - {now})
    for counts in (lower, upper):
        for count in counts[:_TRIES]:
            if factors(cluster, replace(batch, sequences=count), pins):
                yield f"a global batch of {counted(count * batch.seq, 'token')} ({counted(count, 'sequence')})"
                break


def _devices(cluster: Cluster, batch: Batch, pins: Mapping[str, Any], factors: Factors) -> Iterator[str]:
    """The nearest smaller and the nearest larger number of devices."""
    now = cluster.devices
    for counts in (range(now - 1, max(0, now - _TRIES), -1), range(now + 1, now + _TRIES)):
        for count in counts:
            if factors(replace(cluster, devices=count), batch, pins):
                yield f"{count}x{cluster.device.name}"
                break


def _rules(shape: ModelShape, batch: Batch) -> str:
    """What any layout keeps to, where no single change was found."""
    return (
        f"tp must divide {shape.heads} heads, pp be at most {counted(shape.layers, 'layer')}, and dp x micro_batch "
        f"divide {counted(batch.sequences, 'sequence')}; schedules in a V need 2 x pp micro-batches of every replica, "
        "and interleaved ones a multiple of pp. Change several: devices, global batch, pins"
    )
