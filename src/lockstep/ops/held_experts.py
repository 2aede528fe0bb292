"""Experts of a served model that several devices hold together: each has a run of every layer's, and all see all rows.

A device computes the rows of its own experts; then each gets those of the others, and combines them as one device does.
Nothing is added across devices, so the bits are those of one (contract C1). Without gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lockstep.ops.batch import Routes, Routing
from lockstep.ops.operators import Operators
from lockstep.ops.spread_experts import Devices


@dataclass(frozen=True)
class HeldRoutes(Routes):
    """Routes of which this device computes a part: rows ``bounds[i] .. bounds[i + 1]`` are those of device i.

    held: int32 [E / devices + 1], where the rows begin of each expert here, counted from our first row.
    """

    bounds: list[int]
    held: Tensor

    @property
    def groups(self) -> Tensor:
        return self.held


def held_experts(ops: Operators, devices: Devices) -> Operators:
    """The operators of a device that holds its run of every layer's experts, and has all rows as the others do."""
    size, index = devices.size, devices.index

    def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> Routes:
        routes = ops.route(logits, routing, bias)
        here = (len(routes.offsets) - 1) // size
        own = routes.offsets[index * here : (index + 1) * here + 1]
        return HeldRoutes(**vars(routes), bounds=routes.offsets[::here].tolist(), held=own - own[0])

    def dispatch(x: Tensor, routes: HeldRoutes) -> Tensor:
        return ops.dispatch(x, replace(routes, rows=routes.rows[routes.bounds[index] : routes.bounds[index + 1]]))

    def experts(
        x: Tensor, gates: Sequence[Any], ups: Sequence[Any], downs: Sequence[Any], groups: Tensor, activation: str
    ) -> Tensor:
        if not len(x):
            return x
        gates, ups, downs = (_own(part, devices) for part in (gates, ups, downs))
        return ops.grouped_linear(ops.grouped_gated(x, gates, ups, groups, activation), downs, groups)

    def combine(y: Tensor, routes: HeldRoutes) -> Tensor:
        found = y.new_empty(routes.bounds[-1], y.shape[1])
        parts = [found[start:stop] for start, stop in zip(routes.bounds, routes.bounds[1:], strict=False)]
        parts[index].copy_(y)
        devices.exchange([y] * size, parts)
        return ops.combine(found, routes)

    return replace(ops, route=route, dispatch=dispatch, combine=combine, experts=experts)


def _own(weights: Sequence[Any], devices: Devices) -> list[Any]:
    """Of all experts' weights, those here."""
    here = len(weights) // devices.size
    return list(weights[devices.index * here : (devices.index + 1) * here])
