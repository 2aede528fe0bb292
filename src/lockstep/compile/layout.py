"""A drawing of a graph in layers (Sugiyama, Tagawa and Toda, 1981): every edge goes down, few cross. Plain integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 6
"""Passes over the layers, down and up in turn, for the order within them and again for the places."""


@dataclass(frozen=True)
class Layout:
    """places[i]: column (1.0 is a node's width) and layer of node i. paths[e]: places that edge e goes through."""

    places: tuple[tuple[float, int], ...]
    paths: tuple[tuple[tuple[float, int], ...], ...]


def layout(count: int, edges: Sequence[tuple[int, int]]) -> Layout:
    """Place `count` nodes, numbered so that every edge (from, to) goes to a larger number."""
    layers = _layers(count, edges)
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
    columns = _columns(rows, above, below)
    places = [(columns[node], layers[node]) for node in range(len(layers))]
    return Layout(tuple(places[:count]), tuple(tuple(places[node] for node in chain) for chain in chains))


def _layers(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The longest way from a source; sources themselves stand right above their first user."""
    layers, sources = [0] * count, [True] * count
    for a, b in sorted(edges, key=lambda edge: edge[1]):
        layers[b] = max(layers[b], layers[a] + 1)
        sources[b] = False
    first = [max(layers, default=0)] * count
    for a, b in edges:
        first[a] = min(first[a], layers[b] - 1)
    return [first[i] if sources[i] else layers[i] for i in range(count)]


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


def _columns(rows: list[list[int]], above: list[list[int]], below: list[list[int]]) -> list[float]:
    """Columns near the neighbours' mean, at least a width apart."""
    size = sum(map(len, rows))
    columns = [0.0] * size
    for row in rows:
        for i, node in enumerate(row):
            columns[node] = i - len(row) / 2
    for sweep in range(_SWEEPS):
        near, order = (below, reversed(rows)) if sweep % 2 else (above, iter(rows))
        for row in order:
            wanted = [sum(columns[m] for m in near[n]) / len(near[n]) if near[n] else columns[n] for n in row]
            for node, column in zip(row, _apart(wanted), strict=True):
                columns[node] = column
    return columns


def _apart(wanted: list[float]) -> list[float]:
    """The places nearest to the wanted ones (least squares) at distances of at least one, in the same order.

    Without the distances that is: x[i] - i must not fall; runs that would fall are set to their mean.
    """
    runs: list[tuple[float, int]] = []
    for i, place in enumerate(wanted):
        mean, length = place - i, 1
        while runs and runs[-1][0] > mean:
            other, more = runs.pop()
            mean, length = (mean * length + other * more) / (length + more), length + more
        runs.append((mean, length))
    flat = [mean for mean, length in runs for _ in range(length)]
    return [mean + i for i, mean in enumerate(flat)]
