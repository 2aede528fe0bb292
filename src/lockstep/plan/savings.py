"""How candidates that exceed the memory are made to fit: offload what hides, recompute as little as needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lockstep.plan.cluster import Cluster
from lockstep.plan.coefficients import Coefficients
from lockstep.plan.columns import Column, Columns, columns
from lockstep.plan.compute import layer_time
from lockstep.plan.layout import Batch
from lockstep.plan.memory import in_flight, memory, plain_layer_bytes
from lockstep.plan.pins import Pins
from lockstep.plan.shape import ModelShape

Table = dict[str, Column]


def with_savings(
    table: Table, shape: ModelShape, cluster: Cluster, batch: Batch, factors: Coefficients, pins: Pins
) -> Table:
    """The candidates, those that do not fit once with recomputation alone and once with offload first.

    Pinned ``recompute``, ``recompute_layers`` and ``offload_layers`` are left as they are.
    """
    none = {**table, "offload_layers": np.zeros(len(table["pp"])), "recompute_layers": np.zeros(len(table["pp"]))}
    fixed = {name: float(pins[name]) for name in ("offload_layers", "recompute_layers") if name in pins}
    none.update({name: none[name] + value for name, value in fixed.items()})
    recomputed = _recompute(none, shape, batch, cluster.device.capacity, pins)
    if fixed or "recompute" in pins:
        return recomputed
    hidden = {**none, "offload_layers": _offload(none, shape, batch, cluster, factors)}
    away = _recompute(hidden, shape, batch, cluster.device.capacity, pins)
    useful = away["offload_layers"] > 0
    return {name: np.concatenate([column, away[name][useful]]) for name, column in recomputed.items()}


def _offload(table: Table, shape: ModelShape, batch: Batch, cluster: Cluster, factors: Coefficients) -> Column:
    """Layers per stage to offload: as many as needed; they must hide behind the forward and have room in the host."""
    rows = columns(shape, table, batch)
    one = memory(columns(shape, {**table, "offload_layers": 1 + 0 * rows.pp}, batch)).total
    # Linear in the number, but for the last two layers, of which as many move at once.
    most = np.maximum(1.0, rows.slow_layers - 2)
    least = memory(columns(shape, {**table, "offload_layers": most}, batch)).total
    per_layer = np.maximum((one - least) / np.maximum(most - 1, 1), 1.0)
    needed = 1 + np.maximum(0.0, np.ceil((one - cluster.device.capacity) / per_layer))
    count = np.minimum(np.minimum(needed, worth_offloading(rows, cluster, factors)), rows.slow_layers)
    return np.where((memory(rows).total > cluster.device.capacity) & (rows.recompute != 2), count, 0.0)


def worth_offloading(rows: Columns, cluster: Cluster, factors: Coefficients) -> Column:
    """Layers of a stage whose offload hides behind its forward, or where copies cannot hide, all if a layer's copies
    take less than its second forward would; no more than have room in the host's memory."""
    seconds = plain_layer_bytes(rows) / (cluster.device.host_gb_s * 1e9)
    forward = layer_time(rows, cluster.device, factors).forward
    hides = np.floor(forward * rows.slow_layers / seconds)
    count = hides if cluster.device.copies_hide else np.where(2 * seconds < forward, rows.slow_layers, 0.0)
    room = np.floor(cluster.device.host_memory_gb * 1e9 / (plain_layer_bytes(rows) * in_flight(rows)))
    return np.minimum(count, room)


def _recompute(table: Table, shape: ModelShape, batch: Batch, capacity: float, pins: Pins) -> Table:
    """The table with the fewest layers per stage recomputed fully that make a row fit (0 where it fits or cannot)."""
    if "recompute" in pins or "recompute_layers" in pins:
        return table
    rows = columns(shape, table, batch)
    rest = rows.slow_layers - table["offload_layers"]
    full = memory(rows).total > capacity
    asks = np.flatnonzero(full & (rest > 1) & (rows.recompute != 2))
    counts = np.zeros(len(rows))
    counts[asks] = _fewest(rows.take(asks), rest[asks] - 1, capacity)
    return {**table, "recompute_layers": counts}


def _fewest(rows: Columns, most: Column, capacity: float) -> Column:
    """The fewest layers, from 1 to ``most``, that make each row fit; 0 where no number does.

    Each layer more takes less memory, but for the last few beside offload, where there is less to do meanwhile.
    """
    high = most.copy()
    for fewer in (0.0, 1.0, 2.0, 3.0):
        tried = np.maximum(1.0, most - fewer)
        high = np.where(_fits(rows, high, capacity), high, tried)
    possible, low = _fits(rows, high, capacity), np.ones(len(rows))
    while (low < high).any():
        middle = np.floor((low + high) / 2)
        fits = _fits(rows, middle, capacity)
        low, high = np.where(fits, low, np.minimum(middle + 1, high)), np.where(fits, middle, high)
    return np.where(possible, high, 0.0)


def _fits(rows: Columns, recomputed: Column, capacity: float) -> NDArray[np.bool_]:
    return memory(replace(rows, recompute_layers=recomputed)).total <= capacity
