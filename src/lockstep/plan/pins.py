"""What a user pins: values of a layout that the search must not change, checked and with their types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from math import isqrt, prod
from numbers import Integral
from typing import Any

from lockstep.errors import LockstepError
from lockstep.given import instance
from lockstep.plan.cluster import Cluster
from lockstep.plan.layout import MOST, PER_STAGE, RECOMPUTE, SCHEDULES, TWO_CHUNKS, Batch
from lockstep.plan.shape import ModelShape
from lockstep.quantities import counted

Pins = Mapping[str, Any]

PINNABLE = (
    "pp", "dp", "cp", "tp", "ep", "fsdp", "micro_batch", "schedule", "chunks", "recompute", "recompute_layers",
    "offload_layers", "sequence_parallel", "bucket_mb", "gradient_groups", *PER_STAGE,
)  # fmt: skip
_RANGES = {"fsdp": (0, 3)}
"""Of pinned numbers: others are 1 to ``MOST``."""
_DIGITS = re.compile("-?[0-9]+")
_LONGEST = 20
_OF_LAYERS = ("recompute_layers", "offload_layers")


def check_pins(pins: Pins, shape: ModelShape, cluster: Cluster, batch: Batch) -> dict[str, Any]:
    """The pins with their types, or a LockstepError that says what is wrong and what to change."""
    fixed: dict[str, Any] = {}
    for key, value in instance(pins, Mapping, "pins").items():
        if key not in PINNABLE:
            near = get_close_matches(str(key), PINNABLE, n=1, cutoff=0.0)[0]
            raise LockstepError(f"pin {key!r} is unknown: the nearest is {near!r}; known are {', '.join(PINNABLE)}.")
        if key in PER_STAGE:
            fixed[key] = _list(key, value, shape)
            continue
        words = {"schedule": SCHEDULES, "recompute": RECOMPUTE}.get(key)
        if words is not None:
            if value not in words:
                raise LockstepError(f"pin {key}={value}: expected one of {', '.join(words)}.")
            fixed[key] = value
            continue
        if key == "sequence_parallel":
            fixed[key] = _switch(key, value)
            continue
        fixed[key] = _whole(key, value, (0, shape.layers) if key in _OF_LAYERS else _RANGES.get(key, (1, MOST)))
    if fixed.get("recompute") == "full" and fixed.get("offload_layers"):
        raise LockstepError(
            f"pins recompute=full and offload_layers={fixed['offload_layers']}: what is recomputed leaves nothing to "
            "offload. Drop one, or pin recompute=none and a number of recompute_layers."
        )
    if fixed.get("recompute") == "full" and fixed.get("recompute_layers"):
        raise LockstepError(
            f"pins recompute=full and recompute_layers={fixed['recompute_layers']}: full recomputes every layer. Drop "
            "one, or pin recompute=none and recompute_layers."
        )
    if (together := sum(fixed.get(key, 0) for key in _OF_LAYERS)) > shape.layers:
        raise LockstepError(
            f"pins recompute_layers={fixed['recompute_layers']} and offload_layers={fixed['offload_layers']} are of "
            f"{counted(together, 'layer')}, and {shape.name} has {shape.layers}: what is recomputed is not offloaded. "
            "Pin fewer."
        )
    _check_stages(shape, fixed)
    _check_experts(shape, fixed)
    _check_schedule(shape, fixed)
    if batch.sequences % fixed.get("micro_batch", 1):
        raise LockstepError(
            f"pin micro_batch={fixed['micro_batch']} does not divide the "
            f"{counted(batch.sequences, 'sequence')} of a step: pin a divisor, or change the global batch."
        )
    degrees = {key: fixed[key] for key in ("pp", "dp", "cp", "tp") if key in fixed}
    together = prod(degrees.values())
    if cluster.devices % together:
        said = " x ".join(f"{key} {value}" for key, value in degrees.items())
        total = f" = {together}" if len(degrees) > 1 else ""
        options = divisors(cluster.devices)
        shown = ", ".join(map(str, options[:12])) + (", ..." if len(options) > 12 else "")
        raise LockstepError(
            f"pinned {said}{total} does not divide the {counted(cluster.devices, 'device')}: pin a divisor of "
            f"{cluster.devices} ({shown})."
        )
    return fixed


def _whole(key: str, value: Any, span: tuple[int, int]) -> int:
    """A pinned number, which the command line has as text."""
    low, high = span
    text = isinstance(value, str)
    if not (_DIGITS.fullmatch(value) if text else isinstance(value, Integral) and not isinstance(value, bool)):
        raise LockstepError(f"pin {key}={value!s:.60}: expected a whole number.")
    found = int(value) if not text or len(value) < _LONGEST else MOST + 1
    if not low <= found <= high:
        said = f"at least {low}" if found < low and high == MOST else f"{low} to {high}"
        raise LockstepError(f"pin {key}={value!s:.60}: expected {said}.")
    return found


def _switch(key: str, value: Any) -> int:
    """0 or 1, which a Python caller may give as a bool and the command line as a word."""
    found = {"0": 0, "false": 0, "1": 1, "true": 1}.get(str(value).lower())
    if found is None:
        raise LockstepError(f"pin {key}={value!s:.60}: expected 0 or 1.")
    return found


def _list(key: str, value: Any, shape: ModelShape) -> tuple[int, ...]:
    """A pinned number for each stage, which the command line has as text: 9,8,8,7."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not parts:
        raise LockstepError(f"pin {key}={value!s:.60}: expected a number for each stage, such as {key}=9,8,8,7.")
    least = 1 if key == "layers_per_stage" else 0
    each = tuple(_whole(key, part.strip() if isinstance(part, str) else part, (least, shape.layers)) for part in parts)
    if key == "layers_per_stage" and sum(each) != shape.layers:
        raise LockstepError(
            f"pin {key}={','.join(map(str, each))}: these are {counted(sum(each), 'layer')}, and "
            f"{shape.name} has {shape.layers}."
        )
    return each


def _check_stages(shape: ModelShape, pins: dict[str, Any]) -> None:
    """Pin as many stages as pinned lists have numbers. Raises LockstepError where they contradict it or one another."""
    for key in PER_STAGE:
        if key not in pins:
            continue
        if pins.setdefault("pp", len(pins[key])) != len(pins[key]):
            raise LockstepError(
                f"pin {key}={','.join(map(str, pins[key]))} has {counted(len(pins[key]), 'number')} for "
                f"{counted(pins['pp'], 'stage')}: give one for each stage."
            )
    twice = [("recompute_per_stage", "recompute_layers"), ("offload_per_stage", "offload_layers")]
    for key, other in twice:
        if key in pins and other in pins:
            raise LockstepError(f"pins {key} and {other} say the same twice. Drop one.")
    if pins.get("recompute") == "full" and ("recompute_per_stage" in pins or any(pins.get("offload_per_stage", ()))):
        raise LockstepError(
            "pin recompute=full recomputes every layer, which leaves nothing for recompute_per_stage or "
            "offload_per_stage. Drop one."
        )
    layers = pins.get("layers_per_stage", (shape.layers,) * pins.get("pp", 1))
    nothing = (0,) * len(layers)
    both = zip(layers, pins.get("recompute_per_stage", nothing), pins.get("offload_per_stage", nothing), strict=True)
    for stage, (count, again, away) in enumerate(both):
        if again + away > count:
            raise LockstepError(
                f"pins recompute {again} and offload {away} layers of stage {stage}, which has {count}. Pin fewer."
            )


def _check_experts(shape: ModelShape, pins: Pins) -> None:
    ep = pins.get("ep", 1)
    if ep > 1 and not shape.experts:
        raise LockstepError(f"pin ep={ep}: {shape.name} has no experts to spread. Drop the pin.")
    if ep > 1 and shape.experts % ep:
        raise LockstepError(
            f"pin ep={ep} does not divide the {shape.experts} experts of {shape.name}: use one of "
            f"{', '.join(map(str, divisors(shape.experts)))}."
        )


def _check_schedule(shape: ModelShape, pins: Pins) -> None:
    """Raise LockstepError for pinned stages, schedule and chunks of which no pipeline can be made."""
    name, chunks, pp = pins.get("schedule"), pins.get("chunks"), pins.get("pp")
    several = name in TWO_CHUNKS or (chunks or 1) > 1
    said = " ".join(f"{key}={pins[key]}" for key in ("pp", "schedule", "chunks") if key in pins)
    if name not in (None, "interleaved") and chunks not in (None, its := 2 if name in TWO_CHUNKS else 1):
        raise LockstepError(f"pins {said}: {name} has {counted(its, 'chunk')} per stage. Drop the pin of chunks.")
    if several and pp == 1:
        raise LockstepError(f"pins {said}: chunks need a pipeline. Pin pp to at least 2, or drop it.")
    least = (pp or 2) * (chunks or 2) if several else pp or 1
    if least > shape.layers:
        raise LockstepError(
            f"pins {said}: {least} chunks of at least one layer do not come from the "
            f"{counted(shape.layers, 'layer')} of {shape.name}. Pin fewer stages or chunks."
        )


def divisors(n: int) -> list[int]:
    """Of a whole number, ascending."""
    small = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})
