"""Every layout worth looking at for a model on a cluster, as columns; pinned values are never changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from itertools import product
from math import isqrt, prod
from numbers import Integral
from typing import Any

import numpy as np

from lockstep.config.parallel import BUCKET_MB
from lockstep.errors import LockstepError
from lockstep.given import instance
from lockstep.plan.cluster import Cluster
from lockstep.plan.columns import Column
from lockstep.plan.factoring import cannot_factor
from lockstep.plan.layout import RECOMPUTE, SCHEDULES, TWO_CHUNKS, Batch
from lockstep.plan.shape import ModelShape

Pins = Mapping[str, Any]

PINNABLE = (
    "pp", "dp", "cp", "tp", "ep", "fsdp", "micro_batch", "schedule", "chunks", "recompute", "recompute_layers",
    "offload_layers", "sequence_parallel", "bucket_mb",
)  # fmt: skip
_MOST = 1 << 24
_RANGES = {"fsdp": (0, 3), "sequence_parallel": (0, 1)}
"""Of pinned numbers: others are 1 to ``_MOST``."""
_DIGITS = re.compile("-?[0-9]+")
_LONGEST = 20
_OF_LAYERS = ("recompute_layers", "offload_layers")
_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 16, 32)
_CHUNKS = (2, 3, 4, 5, 6, 8)
_SHORTEST_SLICE = 2048
"""Context parallelism below this many tokens per rank only costs."""


def candidates(shape: ModelShape, cluster: Cluster, batch: Batch, pins: Pins | None = None) -> dict[str, Column]:
    """Arrays by the names of ``Layout``'s fields, one row per layout; codes for schedule and recompute.

    Raises LockstepError if the pins contradict the cluster, the model or the batch, or if nothing factors.
    """
    fixed = check_pins(pins or {}, shape, cluster, batch)
    meshes = _meshes(shape, cluster, batch, fixed)
    rows = [(*mesh, *choice) for mesh in meshes for choice in _choices(shape, batch, mesh, fixed)]
    if not rows:
        raise LockstepError(_nothing(shape, cluster, batch, fixed))
    names = ("pp", "dp", "cp", "tp", "ep", "micro_batch", "fsdp", "schedule", "chunks", "recompute")
    table = dict(zip(names, np.array(rows, dtype=np.float64).T, strict=True))
    # This system shares out rows once: over tp, or over cp.
    once = (table["cp"] > 1) & (table["tp"] > 1) & (shape.states == "masters")
    pinned = fixed.get("sequence_parallel")
    shared = np.where(once, 0.0, 1.0) if pinned is None else np.full(len(rows), float(pinned))
    bucket = np.full(len(rows), float(fixed.get("bucket_mb", BUCKET_MB)))
    return table | {"sequence_parallel": shared, "bucket_mb": bucket}


def check_pins(pins: Pins, shape: ModelShape, cluster: Cluster, batch: Batch) -> dict[str, Any]:
    """The pins with their types, or a LockstepError that says what is wrong and what to change."""
    fixed: dict[str, Any] = {}
    for key, value in instance(pins, Mapping, "pins").items():
        if key not in PINNABLE:
            near = get_close_matches(str(key), PINNABLE, n=1, cutoff=0.0)[0]
            raise LockstepError(f"pin {key!r} is unknown: the nearest is {near!r}; known are {', '.join(PINNABLE)}.")
        words = {"schedule": SCHEDULES, "recompute": RECOMPUTE}.get(key)
        if words is not None:
            if value not in words:
                raise LockstepError(f"pin {key}={value}: expected one of {', '.join(words)}.")
            fixed[key] = value
            continue
        fixed[key] = _whole(key, value, (0, shape.layers) if key in _OF_LAYERS else _RANGES.get(key, (1, _MOST)))
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
    _check_experts(shape, fixed)
    _check_schedule(shape, fixed)
    if batch.sequences % fixed.get("micro_batch", 1):
        raise LockstepError(
            f"pin micro_batch={fixed['micro_batch']} does not divide the {batch.sequences} sequences of a step: pin a "
            "divisor, or change the global batch."
        )
    degrees = {key: fixed[key] for key in ("pp", "dp", "cp", "tp") if key in fixed}
    together = prod(degrees.values())
    if cluster.devices % together:
        said = " x ".join(f"{key} {value}" for key, value in degrees.items())
        total = f" = {together}" if len(degrees) > 1 else ""
        options = _divisors(cluster.devices)
        shown = ", ".join(map(str, options[:12])) + (", ..." if len(options) > 12 else "")
        raise LockstepError(
            f"pinned {said}{total} does not divide the {cluster.devices} devices: pin a divisor of "
            f"{cluster.devices} ({shown})."
        )
    return fixed


def _whole(key: str, value: Any, span: tuple[int, int]) -> int:
    """A pinned number, which the command line has as text."""
    low, high = span
    text = isinstance(value, str)
    if not (_DIGITS.fullmatch(value) if text else isinstance(value, Integral) and not isinstance(value, bool)):
        raise LockstepError(f"pin {key}={value!s:.60}: expected a whole number.")
    found = int(value) if not text or len(value) < _LONGEST else _MOST + 1
    if not low <= found <= high:
        said = f"at least {low}" if found < low and high == _MOST else f"{low} to {high}"
        raise LockstepError(f"pin {key}={value!s:.60}: expected {said}.")
    return found


def _check_experts(shape: ModelShape, pins: Pins) -> None:
    ep = pins.get("ep", 1)
    if ep > 1 and not shape.experts:
        raise LockstepError(f"pin ep={ep}: {shape.name} has no experts to spread. Drop the pin.")
    if ep > 1 and shape.experts % ep:
        raise LockstepError(
            f"pin ep={ep} does not divide the {shape.experts} experts of {shape.name}: use one of "
            f"{', '.join(map(str, _divisors(shape.experts)))}."
        )


def _check_schedule(shape: ModelShape, pins: Pins) -> None:
    """Raise LockstepError for pinned stages, schedule and chunks of which no pipeline can be made."""
    name, chunks, pp = pins.get("schedule"), pins.get("chunks"), pins.get("pp")
    several = name in TWO_CHUNKS or (chunks or 1) > 1
    said = " ".join(f"{key}={pins[key]}" for key in ("pp", "schedule", "chunks") if key in pins)
    if name not in (None, "interleaved") and chunks not in (None, its := 2 if name in TWO_CHUNKS else 1):
        raise LockstepError(f"pins {said}: {name} has {its} chunk{'s' * (its > 1)} per stage. Drop the pin of chunks.")
    if several and pp == 1:
        raise LockstepError(f"pins {said}: chunks need a pipeline. Pin pp to at least 2, or drop it.")
    least = (pp or 2) * (chunks or 2) if several else pp or 1
    if least > shape.layers:
        raise LockstepError(
            f"pins {said}: {least} chunks of at least one layer do not come from the {shape.layers} layers of "
            f"{shape.name}. Pin fewer stages or chunks."
        )


def _meshes(shape: ModelShape, cluster: Cluster, batch: Batch, pins: Pins) -> list[tuple[int, int, int, int, int]]:
    """(pp, dp, cp, tp, ep) that multiply to the devices and divide heads, sequence, experts and batch."""
    found = []
    pairs = product(_tensor(shape, cluster, pins), _context(batch, cluster, pins))
    both = [(tp, cp) for tp, cp in pairs if cluster.devices % (tp * cp) == 0]
    # A pinned cp that no tp leaves enough key heads for is looked at all the same.
    swap = [pair for pair in both if _swaps(shape, *pair)] or (both if "cp" in pins else [])
    for tp, cp in swap:
        rest = cluster.devices // (tp * cp)
        for pp in [pins["pp"]] if "pp" in pins else _divisors(rest):
            if rest % pp or pp > shape.layers or ("dp" in pins and pins["dp"] != rest // pp):
                continue
            dp = rest // pp
            if batch.sequences % dp == 0:
                found += [(pp, dp, cp, tp, ep) for ep in _experts(shape, dp * cp, pins)]
    return found


def _choices(
    shape: ModelShape, batch: Batch, mesh: tuple[int, int, int, int, int], pins: Pins
) -> list[tuple[int, int, int, int, int]]:
    """(micro_batch, fsdp, schedule, chunks, recompute) for one mesh."""
    pp, dp, cp, _, _ = mesh
    per_rank = batch.sequences // dp
    sizes = [n for n in ([pins["micro_batch"]] if "micro_batch" in pins else _MICRO_BATCHES) if per_rank % n == 0]
    levels = [pins["fsdp"]] if "fsdp" in pins else _levels(pp, dp * cp)
    # Fused attention never keeps scores: selective recomputation has nothing to drop.
    # What is recomputed whole leaves nothing to offload.
    kinds = [pins["recompute"]] if "recompute" in pins else ["none", "full"][: 1 if pins.get("offload_layers") else 2]
    if "recompute" not in pins and shape.attention == "unfused":
        kinds.append("selective")
    found = []
    for size in sizes:
        for name, chunks in _schedules(shape.layers, pp, per_rank // size, pins):
            codes = (SCHEDULES.index(name), chunks)
            found += [(size, level, *codes, RECOMPUTE.index(kind)) for level in levels for kind in kinds]
    return found


def _schedules(layers: int, pp: int, micro_batches: int, pins: Pins) -> list[tuple[str, int]]:
    """Schedules with their chunks that can run with so many layers, stages and micro-batches."""
    if pp == 1 and pins.get("schedule", "1f1b") == "1f1b":
        return [("1f1b", 1)] if pins.get("chunks", 1) == 1 else []
    if pp == 1:
        return [(pins["schedule"], 1)] if pins.get("chunks", 1) == 1 and pins["schedule"] not in TWO_CHUNKS else []
    found: list[tuple[str, int]] = []
    for name in [pins["schedule"]] if "schedule" in pins else SCHEDULES:
        if name == "interleaved":
            # Micro-batches go round in groups of pp.
            found += [(name, v) for v in sorted({*_CHUNKS, pins.get("chunks", 2)}) if v > 1 and micro_batches % pp == 0]
        elif name in TWO_CHUNKS:
            if micro_batches >= 2 * pp:
                found.append((name, 2))
        else:
            found.append((name, 1))
    return [(n, v) for n, v in found if layers >= pp * v and pins.get("chunks", v) == v]


def _tensor(shape: ModelShape, cluster: Cluster, pins: Pins) -> list[int]:
    if "tp" in pins:
        if shape.heads % pins["tp"]:
            fits = [n for n in _divisors(shape.heads) if cluster.devices % n == 0]
            raise LockstepError(
                f"pin tp={pins['tp']} does not divide the {shape.heads} attention heads of {shape.name}: "
                f"use one of {', '.join(map(str, fits))}."
            )
        return [pins["tp"]]
    # Key heads are split or repeated, never cut; beyond a node the sums of every layer cross the network.
    whole = [n for n in _divisors(shape.heads) if shape.kv_heads % n == 0 or n % shape.kv_heads == 0]
    if shape.states == "masters":  # this system's sums are made of a power of two of equal segments (canonical_tp)
        whole = [n for n in whole if n & (n - 1) == 0 and shape.kv_heads % n == 0 and shape.intermediate % n == 0]
    return [n for n in whole if n <= cluster.node and cluster.devices % n == 0]


def _context(batch: Batch, cluster: Cluster, pins: Pins) -> list[int]:
    if "cp" in pins:
        if batch.seq % pins["cp"]:
            raise LockstepError(f"pin cp={pins['cp']} does not divide the sequence of {batch.seq} tokens.")
        return [pins["cp"]]
    powers = [2**n for n in range(11)]
    return [n for n in powers if n == 1 or (batch.seq % n == 0 and batch.seq // n >= _SHORTEST_SLICE)]


def _swaps(shape: ModelShape, tp: int, cp: int) -> bool:
    """Whether key heads suffice: this system's context parallelism exchanges rows for heads."""
    return cp == 1 or shape.states == "mixed" or shape.kv_heads % (tp * cp) == 0


def _experts(shape: ModelShape, group: int, pins: Pins) -> list[int]:
    if not shape.experts:
        return [1] if pins.get("ep", 1) == 1 else []
    options = [pins["ep"]] if "ep" in pins else _divisors(shape.experts)
    return [n for n in options if shape.experts % n == 0 and group % n == 0]


def _levels(pp: int, group: int) -> list[int]:
    if group == 1:
        return [0]
    # With a pipeline, sharded gradients or weights would travel for every micro-batch: pinned only.
    return [0, 1, 2, 3] if pp == 1 else [0, 1]


def _divisors(n: int) -> list[int]:
    small = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})


def _nothing(shape: ModelShape, cluster: Cluster, batch: Batch, pins: Pins) -> str:
    any_batch = replace(batch, sequences=cluster.devices)  # which every dp divides
    sizes = [pins["micro_batch"]] if "micro_batch" in pins else _MICRO_BATCHES
    units = {dp * size for _, dp, *_ in _meshes(shape, cluster, any_batch, pins) for size in sizes}

    def factors(place: Cluster, given: Batch, fixed: Pins) -> bool:
        if place.devices % prod(int(fixed.get(key, 1)) for key in ("pp", "dp", "cp", "tp")):
            return False
        meshes = _meshes(shape, place, given, fixed)
        return any(_choices(shape, given, mesh, fixed) for mesh in meshes)

    return cannot_factor(shape, cluster, batch, pins, factors, units)
