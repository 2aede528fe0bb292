"""What the shape of a level's links leaves of its bandwidth: a switch, a full mesh, or a ring.

Counted in places of a level: a place is a device of the innermost level, a node of the next. ``ranks`` of a group sit
on places ``apart`` from one another, and the groups in between do the same at the same time.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from lockstep.plan.columns import Column

Topology = Literal["switch", "mesh", "ring"]


def ring_share(topology: Topology, ranks: Column, apart: Any, places: Any) -> Column:
    """Of a device's bandwidth, what ring collectives (all-reduce, all-gather) of such groups reach.

    Switch: all. Mesh (a link between every two places): the links to the group's own members. Ring (two neighbours,
    half of the bandwidth to each): the groups share the links, and one that does not go all the way round comes back
    by the links of the other direction.
    """
    if topology == "mesh":
        return _of_mesh(ranks, places)
    if topology == "ring":
        closed = ranks * apart >= places
        return np.where(closed, 1.0, 0.5) / np.maximum(1.0, apart)
    return np.ones(np.shape(ranks))


def exchange_share(topology: Topology, ranks: Column, apart: Any, places: Any) -> Column:
    """The same of all-to-all, which in a ring passes on what is not for the neighbour: round the ring, a quarter of the
    ranks on average; along a line, half of them cross the middle."""
    if topology == "mesh":
        return _of_mesh(ranks, places)
    if topology == "ring":
        others = np.maximum(ranks - 1, 1)
        closed, line = np.floor(ranks**2 / 4) / others, np.floor(ranks**2 / 4) * 2 / others
        return 1 / (np.maximum(1.0, np.where(ranks * apart >= places, closed, line)) * np.maximum(1.0, apart))
    return np.ones(np.shape(ranks))


def pair_share(topology: Topology, apart: Any, places: Any) -> Column:
    """The same of one message to the place ``apart``, every device sending one: a mesh has one link for it, a ring half
    of the bandwidth, which those that pass on the way share."""
    apart = np.asarray(apart, dtype=np.float64)
    if topology == "mesh":
        return np.full(apart.shape, 1.0) / np.maximum(1.0, np.asarray(places, dtype=np.float64) - 1)
    if topology == "ring":
        return 0.5 / np.maximum(1.0, np.minimum(apart, places - apart))
    return np.ones(apart.shape)


def _of_mesh(ranks: Column, places: Any) -> Column:
    share: Column = np.maximum(ranks - 1, 1) / np.maximum(np.asarray(places, dtype=np.float64) - 1, 1)
    return np.minimum(1.0, share)
