"""Every layout worth looking at for a model on a cluster, as columns; pinned values are never changed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np

from lockstep.config.parallel import BUCKET_MB
from lockstep.errors import LockstepError
from lockstep.plan.cluster import Cluster
from lockstep.plan.columns import Column
from lockstep.plan.factoring import cannot_factor
from lockstep.plan.layout import PER_STAGE, RECOMPUTE, SCHEDULES, TWO_CHUNKS, Batch
from lockstep.plan.pins import Pins, divisors
from lockstep.plan.shape import ModelShape
from lockstep.quantities import counted

_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 16, 32)
_CHUNKS = (2, 3, 4, 5, 6, 8)
_SHORTEST_SLICE = 2048
"""Context parallelism below this many tokens per rank only costs."""


def candidates(shape: ModelShape, cluster: Cluster, batch: Batch, fixed: Pins) -> dict[str, Column]:
    """Arrays by the names of ``Layout``'s fields, one row per layout; codes for schedule and recompute.

    fixed: pins of `check_pins`. Raises LockstepError if they contradict the model's heads or the sequence, or if
    nothing factors.
    """
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
    # One canonical group for each replica takes the least memory; peers have none.
    groups = np.full_like(table["dp"], fixed["gradient_groups"]) if "gradient_groups" in fixed else table["dp"]
    groups = np.where(shape.states == "masters", groups, 0.0)
    more = {"sequence_parallel": shared, "gradient_groups": groups}
    more |= {"bucket_mb": np.full(len(rows), float(fixed.get("bucket_mb", BUCKET_MB)))}
    if cut := fixed.get("layers_per_stage"):
        more |= {"slow_layers": np.full(len(rows), float(max(cut))), "last_layers": np.full(len(rows), float(cut[-1]))}
    return table | more


def _meshes(shape: ModelShape, cluster: Cluster, batch: Batch, pins: Pins) -> list[tuple[int, int, int, int, int]]:
    """(pp, dp, cp, tp, ep) that multiply to the devices and divide heads, sequence, experts and batch."""
    found = []
    pairs = product(_tensor(shape, cluster, pins), _context(batch, cluster, pins))
    both = [(tp, cp) for tp, cp in pairs if cluster.devices % (tp * cp) == 0]
    # A pinned cp that no tp leaves enough key heads for is looked at all the same.
    swap = [pair for pair in both if _swaps(shape, *pair)] or (both if "cp" in pins else [])
    for tp, cp in swap:
        rest = cluster.devices // (tp * cp)
        for pp in [pins["pp"]] if "pp" in pins else divisors(rest):
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
    per_rank, groups = batch.sequences // dp, pins.get("gradient_groups", dp)
    sizes = [n for n in ([pins["micro_batch"]] if "micro_batch" in pins else _MICRO_BATCHES) if per_rank % n == 0]
    sizes = [n for n in sizes if batch.sequences // n % groups == 0]
    levels = [pins["fsdp"]] if "fsdp" in pins else _levels(pp, dp * cp)
    levels = [level for level in levels if level >= 2 or groups % dp == 0]
    # Fused attention never keeps scores: selective recomputation has nothing to drop.
    # What is recomputed whole leaves nothing to offload, and is no number of layers.
    counted = pins.get("offload_layers") or "recompute_layers" in pins or any(name in pins for name in PER_STAGE[1:])
    kinds = [pins["recompute"]] if "recompute" in pins else ["none", "full"][: 1 if counted else 2]
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
    fits = min(pins.get("layers_per_stage", (layers // pp,)))  # chunks of the stage with the fewest layers
    return [(n, v) for n, v in found if v <= fits and pins.get("chunks", v) == v]


def _tensor(shape: ModelShape, cluster: Cluster, pins: Pins) -> list[int]:
    if "tp" in pins:
        if shape.heads % pins["tp"]:
            fits = [n for n in divisors(shape.heads) if cluster.devices % n == 0]
            raise LockstepError(
                f"pin tp={pins['tp']} does not divide the {shape.heads} attention heads of {shape.name}: "
                f"use one of {', '.join(map(str, fits))}."
            )
        return [pins["tp"]]
    # Key heads are split or repeated, never cut; beyond a node the sums of every layer cross the network.
    whole = [n for n in divisors(shape.heads) if shape.kv_heads % n == 0 or n % shape.kv_heads == 0]
    if shape.states == "masters":  # this system's sums are made of a power of two of equal segments (canonical_tp)
        whole = [n for n in whole if n & (n - 1) == 0 and shape.kv_heads % n == 0 and shape.intermediate % n == 0]
    return [n for n in whole if n <= cluster.node and cluster.devices % n == 0]


def _context(batch: Batch, cluster: Cluster, pins: Pins) -> list[int]:
    if "cp" in pins:
        if batch.seq % pins["cp"]:
            raise LockstepError(f"pin cp={pins['cp']} does not divide the sequence of {counted(batch.seq, 'token')}.")
        return [pins["cp"]]
    powers = [2**n for n in range(11)]
    return [n for n in powers if n == 1 or (batch.seq % n == 0 and batch.seq // n >= _SHORTEST_SLICE)]


def _swaps(shape: ModelShape, tp: int, cp: int) -> bool:
    """Whether key heads suffice: this system's context parallelism exchanges rows for heads."""
    return cp == 1 or shape.states == "mixed" or shape.kv_heads % (tp * cp) == 0


def _experts(shape: ModelShape, group: int, pins: Pins) -> list[int]:
    if not shape.experts:
        return [1] if pins.get("ep", 1) == 1 else []
    options = [pins["ep"]] if "ep" in pins else divisors(shape.experts)
    return [n for n in options if shape.experts % n == 0 and group % n == 0]


def _levels(pp: int, group: int) -> list[int]:
    if group == 1:
        return [0]
    # With a pipeline, sharded gradients or weights would travel for every micro-batch: pinned only.
    return [0, 1, 2, 3] if pp == 1 else [0, 1]


def _nothing(shape: ModelShape, cluster: Cluster, batch: Batch, pins: Pins) -> str:
    any_batch = replace(batch, sequences=cluster.devices)  # which every dp divides
    sizes = [pins["micro_batch"]] if "micro_batch" in pins else _MICRO_BATCHES
    units = {dp * size for _, dp, *_ in _meshes(shape, cluster, any_batch, pins) for size in sizes}

    def factors(place: Cluster, given: Batch, fixed: Pins) -> bool:
        for key in PER_STAGE:
            fixed = {**fixed, "pp": len(fixed[key])} if key in fixed else fixed
        if place.devices % prod(int(fixed.get(key, 1)) for key in ("pp", "dp", "cp", "tp")):
            return False
        meshes = _meshes(shape, place, given, fixed)
        return any(_choices(shape, given, mesh, fixed) for mesh in meshes)

    return cannot_factor(shape, cluster, batch, pins, factors, units)
