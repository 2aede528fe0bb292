"""How candidates that exceed the memory are made to fit: offload what hides, recompute as little as needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lockstep.plan.cluster import Cluster
from lockstep.plan.coefficients import Coefficients
from lockstep.plan.columns import Column, Columns, columns
from lockstep.plan.compute import layer_time
from lockstep.plan.kept_bytes import plain_layer_bytes
from lockstep.plan.layout import Batch
from lockstep.plan.memory import in_flight, memory
from lockstep.plan.pins import Pins
from lockstep.plan.shape import ModelShape

Table = dict[str, Column]


def with_savings(
    table: Table, shape: ModelShape, cluster: Cluster, batch: Batch, factors: Coefficients, pins: Pins
) -> Table:
    """The candidates (`as_they_are`), those that do not fit once with recomputation alone and, behind all, once with
    offload first.

    Pinned ``recompute``, ``recompute_layers`` and ``offload_layers`` are left as they are.
    """
    capacity = cluster.device.capacity
    if "recompute" in pins or "recompute_layers" in pins:
        return table
    rows = columns(shape, table, batch)
    tight = np.flatnonzero((memory(rows).total > capacity) & (rows.recompute != 2))
    some = rows_of(table, tight)
    counts = table["recompute_layers"].copy()
    counts[tight] = _recomputed(rows.take(tight), capacity)
    recomputed = {**table, "recompute_layers": counts}
    if "offload_layers" in pins:
        return recomputed
    some["offload_layers"] = _offloaded(rows.take(tight), cluster, factors)
    away = rows_of(some, some["offload_layers"] > 0)
    away["recompute_layers"] = _recomputed(columns(shape, away, batch), capacity)
    return {name: np.concatenate([column, away[name]]) for name, column in recomputed.items()}


def as_they_are(table: Table, pins: Pins) -> Table:
    """The candidates with what is pinned, and nothing else, recomputed and offloaded."""
    fixed = {name: float(pins.get(name, 0)) for name in ("offload_layers", "recompute_layers")}
    return table | {name: np.full(len(table["pp"]), value) for name, value in fixed.items()}


def rows_of(table: Table, index: NDArray[np.int_] | NDArray[np.bool_]) -> Table:
    """The candidates that ``index`` (positions or a mask) selects."""
    return {name: column[index] for name, column in table.items()}


def _offloaded(rows: Columns, cluster: Cluster, factors: Coefficients) -> Column:
    """Layers per stage to offload of rows that do not fit: as many as needed; they must hide behind the forward and
    have room in the host."""
    one = memory(replace(rows, offload_layers=1 + 0 * rows.pp)).total
    # Linear in the number, but for the last two layers, of which as many move at once.
    most = np.maximum(1.0, rows.slow_layers - 2)
    least = memory(replace(rows, offload_layers=most)).total
    per_layer = np.maximum((one - least) / np.maximum(most - 1, 1), 1.0)
    needed = 1 + np.maximum(0.0, np.ceil((one - cluster.device.capacity) / per_layer))
    return np.minimum(np.minimum(needed, worth_offloading(rows, cluster, factors)), rows.slow_layers)


def worth_offloading(rows: Columns, cluster: Cluster, factors: Coefficients) -> Column:
    """Layers of a stage whose offload hides behind its forward, or where copies cannot hide, all if a layer's copies
    take less than its second forward would; no more than have room in the host's memory."""
    seconds = plain_layer_bytes(rows) / (cluster.device.host_gb_s * 1e9)
    forward = layer_time(rows, cluster.device, factors).forward
    hides = np.floor(forward * rows.slow_layers / seconds)
    count = hides if cluster.device.copies_hide else np.where(2 * seconds < forward, rows.slow_layers, 0.0)
    room = np.floor(cluster.device.host_memory_gb * 1e9 / (plain_layer_bytes(rows) * in_flight(rows)))
    return np.minimum(count, room)


def _recomputed(rows: Columns, capacity: float) -> Column:
    """The fewest layers per stage, but one, that make each row fit when they are recomputed fully; 0 where it fits
    without, or cannot."""
    rest = rows.slow_layers - rows.offload_layers
    counts = np.zeros(len(rows))
    asks = np.flatnonzero((rest > 1) & ~_fits(rows, counts, capacity))
    counts[asks] = _fewest(rows.take(asks), rest[asks] - 1, capacity)
    return counts


def _fewest(rows: Columns, most: Column, capacity: float) -> Column:
    """The fewest layers, from 1 to ``most``, that make each row fit; 0 where no number does.

    Each layer more takes less memory, but for the last few beside offload, where there is less to do meanwhile.
    """
    high = np.zeros(len(rows))
    for fewer in (0.0, 1.0, 2.0, 3.0):
        left = np.flatnonzero(high == 0)
        tried = np.maximum(1.0, most[left] - fewer)
        high[left] = np.where(_fits(rows.take(left), tried, capacity), tried, 0.0)
    low = np.minimum(high, 1.0)
    while len(left := np.flatnonzero(low < high)):
        middle = np.floor((low[left] + high[left]) / 2)
        fits = _fits(rows.take(left), middle, capacity)
        low[left], high[left] = np.where(fits, low[left], middle + 1), np.where(fits, middle, high[left])
    return high


def _fits(rows: Columns, recomputed: Column, capacity: float) -> NDArray[np.bool_]:
    return memory(replace(rows, recompute_layers=recomputed)).total <= capacity
