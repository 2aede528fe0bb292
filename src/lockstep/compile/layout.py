"""A drawing of a graph in layers (Sugiyama, Tagawa and Toda, 1981): every edge goes down, few cross. Plain integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

_SWEEPS = 6
"""Passes over the layers, down and up in turn, for the order within them and again for the places."""

_BEND = 0.16
"""The width of an edge where it crosses a layer, in widths of a node."""


@dataclass(frozen=True)
class Layout:
    """places[i]: column (1.0 is a node's width) and layer of node i. paths[e]: places that edge e goes through."""

    places: tuple[tuple[float, int], ...]
    paths: tuple[tuple[tuple[float, int], ...], ...]


def layout(edges: Sequence[tuple[int, int]], bands: Sequence[int]) -> Layout:
    """Place the nodes of a graph. bands: one number per node; nodes stand below all of a smaller number (but see
    `_layers`). Nodes are numbered so that edges (from, to) go to larger numbers, and never to a smaller band."""
    count = len(bands)
    layers = _layers(edges, bands)
    chains, links = _with_bends(count, edges, layers)
    rows: list[list[int]] = [[] for _ in range(max(layers, default=-1) + 1)]
    for node, layer in enumerate(layers):
        rows[layer].append(node)
    above: list[list[int]] = [[] for _ in layers]
    below: list[list[int]] = [[] for _ in layers]
    for a, b in links:
        below[a].append(b)
        above[b].append(a)
    _order(rows, above, below)
    columns = _columns(rows, above, below, [1.0] * count + [_BEND] * (len(layers) - count))
    places = [(columns[node], layers[node]) for node in range(len(layers))]
    return Layout(tuple(places[:count]), tuple(tuple(places[node] for node in chain) for chain in chains))


def _layers(edges: Sequence[tuple[int, int]], bands: Sequence[int]) -> list[int]:
    """The longest way from a source within a band; what is made of one source alone stands right above its users."""
    count = len(bands)
    users: list[list[int]] = [[] for _ in range(count)]
    sources: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        users[a].append(b)
        sources[b].append(a)
    layers, aside, top, band = [0] * count, [True] * count, 0, min(bands, default=0)
    for node in sorted(range(count), key=lambda node: (bands[node], node)):
        if bands[node] > band:
            top, band = max(layers) + 1, bands[node]
        layers[node] = max([top, *(layers[source] + 1 for source in sources[node])])
        aside[node] = len(sources[node]) <= 1 and all(aside[source] for source in sources[node])
    for node in reversed(range(count)):
        if aside[node] and users[node]:
            layers[node] = min(layers[user] for user in users[node]) - 1
    return layers


def _with_bends(
    count: int, edges: Sequence[tuple[int, int]], layers: list[int]
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """A node without a box in every layer that an edge crosses; appended to `layers`. Chains per edge, and links."""
    chains: list[list[int]] = []
    links: list[tuple[int, int]] = []
    for a, b in edges:
        chain = [a]
        for layer in range(layers[a] + 1, layers[b]):
            chain.append(len(layers))
            layers.append(layer)
        chain.append(b)
        chains.append(chain)
        links += pairwise(chain)
    return chains, links


def _order(rows: list[list[int]], above: list[list[int]], below: list[list[int]]) -> None:
    """Sort every layer by the mean place of its neighbours, again and again."""
    at = {node: float(i) for row in rows for i, node in enumerate(row)}
    for sweep in range(_SWEEPS):
        near, order = (below, reversed(rows)) if sweep % 2 else (above, iter(rows))
        for row in order:
            keys = {n: sum(at[m] for m in near[n]) / len(near[n]) if near[n] else at[n] for n in row}
            row.sort(key=keys.__getitem__)
            at.update((node, float(i)) for i, node in enumerate(row))


def _columns(rows: list[list[int]], above: list[list[int]], below: list[list[int]], widths: list[float]) -> list[float]:
    """Columns near the neighbours' mean, no two nodes of a layer overlapping."""
    columns = [0.0] * len(widths)
    for row in rows:
        for node, column in zip(row, _apart([0.0] * len(row), [widths[n] for n in row]), strict=True):
            columns[node] = column
    for sweep in range(2 * _SWEEPS):
        near, order = (below, reversed(rows)) if sweep % 2 else (above, iter(rows))
        for row in order:
            wanted = [sum(columns[m] for m in near[n]) / len(near[n]) if near[n] else columns[n] for n in row]
            for node, column in zip(row, _apart(wanted, [widths[n] for n in row]), strict=True):
                columns[node] = column
    return columns


def _apart(wanted: list[float], widths: list[float]) -> list[float]:
    """The places nearest to the wanted ones (least squares) with room for the widths, in the same order.

    Less the room that those before take, places must not fall; runs that would fall are set to their mean.
    """
    starts = list(accumulate((a / 2 + b / 2 for a, b in pairwise(widths)), initial=0.0))
    runs: list[tuple[float, int]] = []
    for start, place in zip(starts, wanted, strict=False):
        mean, length = place - start, 1
        while runs and runs[-1][0] > mean:
            other, more = runs.pop()
            mean, length = (mean * length + other * more) / (length + more), length + more
        runs.append((mean, length))
    flat = [mean for mean, length in runs for _ in range(length)]
    return [mean + start for mean, start in zip(flat, starts, strict=False)]
