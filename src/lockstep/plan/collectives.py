"""Time of collectives from latency and bandwidth of every level that the group of ranks spans."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.plan.cluster import Cluster
from lockstep.plan.coefficients import Coefficients
from lockstep.plan.columns import Column
from lockstep.plan.topology import exchange_share, pair_share, ring_share


def all_reduce(size: Any, ranks: Column, stride: Any, cluster: Cluster, factors: Coefficients) -> Column:
    """Seconds to sum ``size`` bytes over ``ranks`` ranks whose neighbours are ``stride`` devices apart.

    Rings level by level (reduce-scatter inside, outer rings on the shards, all-gather back): at a level where a rank
    meets r - 1 others, 2 (r - 1) / r of its shard cross its link.
    """
    return _over_levels(size, ranks, stride, cluster, factors, passes=2.0)


def all_gather(size: Any, ranks: Column, stride: Any, cluster: Cluster, factors: Coefficients) -> Column:
    """Seconds to gather ``size`` bytes (the result) or to reduce-scatter them: one pass instead of two."""
    return _over_levels(size, ranks, stride, cluster, factors, passes=1.0)


def all_to_all(size: Any, ranks: Column, stride: Any, cluster: Cluster, factors: Coefficients) -> Column:
    """Seconds for every rank to send ``size`` bytes in equal parts to all ranks: bound by the slowest link."""
    seconds, inside = np.zeros(len(ranks)), np.ones(len(ranks))
    for i, level in enumerate(cluster.levels):
        within = _within(ranks, stride, level.size, last=i + 1 == len(cluster.levels))
        crossing, met = (within - inside) / np.maximum(ranks, 1), within / inside
        share = exchange_share(level.topology, met, *_places(cluster, i, stride))
        called = within > inside
        seconds = np.maximum(seconds, crossing * size / (_rate(cluster, i, factors) * share))
        seconds = seconds + called * level.latency_us * 1e-6 * factors.latency
        inside = within
    return seconds


def transfer(size: Any, stride: Any, cluster: Cluster, factors: Coefficients) -> Column:
    """Seconds for one device to send ``size`` bytes to the device ``stride`` further, latency included."""
    stride = np.asarray(stride, dtype=np.float64)
    rate, latency = np.zeros(stride.shape), np.zeros(stride.shape)
    for i, level in reversed(list(enumerate(cluster.levels))):
        here = (stride < level.size) | (i + 1 == len(cluster.levels))
        share = pair_share(level.topology, *_places(cluster, i, stride))
        rate = np.where(here, _rate(cluster, i, factors) * share, rate)
        latency = np.where(here, level.latency_us * 1e-6, latency)
    return _TRANSFER_CALLS * latency * factors.transfer_latency + size / (rate * factors.transfer_bandwidth)


_SHORT_RING = 0.3
"""A ring of n ranks reaches 1 - 0.3 / n of the bus bandwidth: nccl-tests on 2, 4 and 8 A100s (vTrain artefact)."""
_TRANSFER_CALLS = 3.0
"""A send, a receive and the wait of the host between pipeline stages, in collective latencies."""


def _over_levels(
    size: Any, ranks: Column, stride: Any, cluster: Cluster, factors: Coefficients, passes: float
) -> Column:
    seconds, inside = np.zeros(len(ranks)), np.ones(len(ranks))
    for i, level in enumerate(cluster.levels):
        within = _within(ranks, stride, level.size, last=i + 1 == len(cluster.levels))
        met = within / inside
        rate = _rate(cluster, i, factors) * ring_share(level.topology, met, *_places(cluster, i, stride))
        moved = passes * (met - 1) / met * size / inside / (rate * (1 - _SHORT_RING / met))
        waited = level.latency_us * factors.latency + level.hop_us * factors.hop * _hops(met, i)
        seconds = seconds + np.where(met > 1, moved + waited * 1e-6, 0.0)
        inside = within
    return seconds


def _rate(cluster: Cluster, level: int, factors: Coefficients) -> float:
    """Bytes per second of one device at a level."""
    return cluster.levels[level].gb_s * 1e9 * (factors.node_bandwidth if level == 0 else factors.network_bandwidth)


def _places(cluster: Cluster, level: int, stride: Any) -> tuple[Column, float]:
    """How many places of a level neighbours of a group are apart, and how many places there are."""
    place = cluster.levels[level - 1].size if level else 1
    last = level + 1 == len(cluster.levels)  # of which only those of the cluster are there
    size = cluster.devices if last else cluster.levels[level].size
    there = max(1.0, float(np.ceil(size / place)))
    return np.maximum(1.0, np.floor(np.asarray(stride, dtype=np.float64) / place)), there


def _hops(met: Column, level: int) -> Column:
    """Steps whose latency adds up: a ring inside a node, a tree between nodes."""
    return met - 1 if level == 0 else 2 * np.log2(np.maximum(met, 1))


def _within(ranks: Column, stride: Any, size: int, last: bool) -> Column:
    """How many ranks of the group share one unit of a level of ``size`` devices."""
    if last:
        return np.asarray(ranks, dtype=np.float64)
    return np.minimum(ranks, np.maximum(1.0, np.floor(size / np.asarray(stride, dtype=np.float64))))
