"""The search frontier as a picture: memory against step time of the candidates, and where the plans are."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

import numpy as np

from lockstep.plan.cluster import Cluster
from lockstep.plan.evaluate import Evaluated
from lockstep.plan.layout import Layout
from lockstep.plan.planfile import Plan

_WIDTH, _HEIGHT = 900, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 14, 44
"""Pixels around the field of the dots, where the axes are labelled."""
_DOTS = 1500
"""Candidates that are drawn besides the frontier: enough to see the cloud, few enough for any browser."""


def frontier(found: Evaluated, plans: Sequence[Plan], cluster: Cluster) -> str:
    """An SVG: the frontier dark, the other candidates pale, the plans rings, the memory of a device a line."""
    room = cluster.device.capacity / 1e9
    gigabytes, seconds = found.memory / 1e9, found.seconds
    best = plans[0].prediction.step_s
    shown = (gigabytes < 2 * room) & (seconds < 4 * best)
    front = [i for i in pareto(gigabytes, seconds) if shown[i]]
    cloud = np.flatnonzero(shown)
    cloud = cloud[:: max(1, len(cloud) // _DOTS)]
    top, slowest = 2 * room, max(plan.prediction.step_s for plan in plans)
    fastest = min(best, float(seconds[shown].min())) if shown.any() else best
    left, right = fastest * 0.97, max(slowest, float(seconds[shown].max()) if shown.any() else 0.0) * 1.02

    def across(step: float) -> float:
        return _LEFT + (step - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)

    def down(held: float) -> float:
        return _TOP + (1 - held / top) * (_HEIGHT - _TOP - _BOTTOM)

    def circle(layout: Layout, step: float, held: float, kind: str, radius: float) -> str:
        said = escape(f"{layout.describe()}: {step:.3g} s, {held:.1f} GB")
        place = f'cx="{across(step):.1f}" cy="{down(held):.1f}" r="{radius}"'
        return f'<circle class="{kind}" {place}><title>{said}</title></circle>'

    def dot(i: int, kind: str, radius: float) -> str:
        return circle(found.layout(i), float(seconds[i]), float(gigabytes[i]), kind, radius)

    device, steps, held = escape(cluster.device.name), ticks(left, right, 8), ticks(0, top, 6)
    end, base = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    grid = [_line(across(at), across(at), _TOP, base) for at in steps]
    grid += [_line(_LEFT, end, down(at), down(at)) for at in held]
    dots = [dot(int(i), "cloud", 2) for i in cloud] + [dot(i, "front", 4) for i in front]
    rings = [circle(it.layout, it.prediction.step_s, it.prediction.memory_gb, "plan", 6) for it in plans]
    # Last, so that no dot lies upon a label.
    labels = [
        _line(_LEFT, end, down(room), down(room), "room"),
        f'<text x="{end}" y="{down(room) - 6:.1f}" text-anchor="end">{room:.1f} GB: one {device}</text>',
        *(f'<text x="{_LEFT - 8}" y="{down(at) + 4:.1f}" text-anchor="end">{at:g}</text>' for at in held),
        *(f'<text x="{across(at):.1f}" y="{base + 16}" text-anchor="middle">{at:g}</text>' for at in steps),
        f'<text x="{(_LEFT + end) / 2:.0f}" y="{base + 36}" text-anchor="middle">seconds per step</text>',
        f'<text x="12" y="{(_TOP + base) / 2:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 12 {(_TOP + base) / 2:.0f})">GB of the fullest rank</text>',
    ]
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(grid + dots + rings + labels)}</svg>'


def _line(x1: float, x2: float, y1: float, y2: float, kind: str = "tick") -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most so many."""
    raw = (high - low) / most
    base = 10.0 ** floor(log10(raw))
    step = next(factor * base for factor in (1, 2, 5, 10) if factor * base >= raw * (1 - 1e-9))
    return [float(f"{i * step:.12g}") for i in range(ceil(low / step), floor(high / step) + 1)][:most]


def pareto(memory: Sequence[float] | np.ndarray, seconds: Sequence[float] | np.ndarray) -> list[int]:
    """Positions of the candidates that no other beats in both, fastest first."""
    chosen: list[int] = []
    least = float("inf")
    for i in np.lexsort((np.asarray(memory), np.asarray(seconds))):
        if memory[i] < least:
            least = float(memory[i])
            chosen.append(int(i))
    return chosen
