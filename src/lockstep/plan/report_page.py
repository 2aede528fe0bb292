"""The HTML report of a search: the plans with their parts, the search frontier, and the best plan's pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from lockstep.plan.cluster import Cluster, cluster_of
from lockstep.plan.coefficients import Coefficients
from lockstep.plan.evaluate import Evaluated, evaluate
from lockstep.plan.former import GENERATOR
from lockstep.plan.layout import Layout
from lockstep.plan.per_stage import plan_simulation
from lockstep.plan.pins import Pins, check_pins
from lockstep.plan.planfile import Plan
from lockstep.plan.timeline import save_timeline, timeline_html

_WIDTH, _HEIGHT, _EDGE = 900, 360, 60
_DOTS = 1500
"""Candidates that are drawn besides the frontier: enough to see the cloud, few enough for any browser."""


def save_report(
    plans: Sequence[Plan],
    cluster: str | Cluster,
    page: str | Path,
    trace: str | Path | None = None,
    pins: Pins | None = None,
    coefficients: Coefficients | None = None,
    dtype: str = "bf16",
) -> None:
    """Write the report of ``search``'s plans to ``page`` and, if named, the best pipeline's trace for Perfetto."""
    place = cluster_of(cluster)
    factors, best = coefficients or Coefficients(), plans[0]
    run = plan_simulation(best.model, best.layout, best.batch, place, factors, dtype)
    fixed = check_pins(pins or {}, best.model, place, best.batch)
    found = evaluate(best.model, place, best.batch, fixed, factors, dtype)
    if trace is not None:
        save_timeline(run, trace, seconds_per_unit=1.0, held="memory")
    title = f"{best.model.name} on {place.name}"
    pipeline = escape(timeline_html(run, best.layout.describe(), "s", "GB", "memory"), quote=True)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{best.batch.sequences} sequences of {best.batch.seq} tokens per step, {len(found.seconds):,} candidates, "
        f"{int((found.memory <= place.device.capacity).sum()):,} fit in memory.</p>",
        _plans(plans),
        "<h2>Search frontier</h2>",
        '<p class="legend"><span><i class="front"></i>no other takes less memory and less time</span>'
        '<span><i class="cloud"></i>other candidates</span><span><i class="plan"></i>the plans above</span>'
        "<span>above the dashed line: does not fit</span></p>",
        _frontier(found, plans, place),
        "<h2>Pipeline of the best plan</h2>",
        _drawn(run.table.micro_batches, best.layout.micro_batches(best.batch)),
        f'<iframe title="pipeline" style="height:{_high(best.layout.pp)}px" srcdoc="{pipeline}"></iframe>',
    ]
    head = _PAGE.replace("@GENERATOR@", GENERATOR).replace("@TITLE@", escape(title))
    Path(page).write_text(head.replace("@BODY@", "\n".join(parts)), "utf-8")


def _high(stages: int) -> int:
    """Pixels of the pipeline's frame: all lanes, or so many that the rest is scrolled to."""
    return min(180 + 54 * stages, 960)


def _drawn(shown: int, whole: int) -> str:
    """Why the picture's times are not the step's: only the beginning and the end differ from the repeated middle."""
    if shown == whole:
        return ""
    return (
        f"<p>{shown} of {whole} micro-batches are drawn: the middle repeats. Makespan and bubble are the picture's.</p>"
    )


def _plans(plans: Sequence[Plan]) -> str:
    head = ("layout", "step", "tokens/s", "MFU", "bubble", "time", "memory", "why not")
    rows = []
    time_hues = _hues(plan.prediction.parts for plan in plans)
    memory_hues = _hues(plan.prediction.memory_parts for plan in plans)
    for plan in plans:
        it = plan.prediction
        cells = (
            escape(plan.layout.describe()),
            f"{it.step_s:.3g} s",
            f"{it.tokens_s:,.0f}",
            f"{100 * it.mfu:.1f} %",
            f"{100 * it.bubble:.1f} %",
            _bar(it.parts, it.step_s, "s", time_hues),
            _bar(it.memory_parts, it.memory_gb, "GB", memory_hues) + _by_stage(it.stage_memory_gb),
            escape(plan.worse or "best"),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    table = f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{''.join(rows)}</table>"
    return table + _legend("time", time_hues) + _legend("memory", memory_hues)


def _by_stage(held: Sequence[float]) -> str:
    """What a rank of each stage takes, where there are several."""
    return f"<br>by stage: {' '.join(f'{gigabytes:.3g}' for gigabytes in held)}" if len(held) > 1 else ""


def _hues(parts: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """A colour for each part's name, the same in every plan's bar."""
    names = dict.fromkeys(name for of_plan in parts for name, value in of_plan.items() if value)
    return {name: (i * 67) % 360 for i, name in enumerate(names)}


def _legend(what: str, hues: Mapping[str, int]) -> str:
    keys = "".join(
        f'<span><i style="background:{_colour(hue)}"></i>{escape(name)}</span>' for name, hue in hues.items()
    )
    return f'<p class="legend"><b>{what}</b>{keys}</p>'


def _bar(parts: Mapping[str, float], whole: float, unit: str, hues: Mapping[str, int]) -> str:
    """A stacked bar; hovering a part names it."""
    pieces = []
    for name, value in parts.items():
        if value > 0.002 * whole:
            said = escape(f"{name}: {value:.3g} {unit}")
            pieces.append(
                f'<i title="{said}" style="width:{100 * value / whole:.1f}%;background:{_colour(hues[name])}"></i>'
            )
    return f'<span class="bar">{"".join(pieces)}</span>{whole:.3g} {unit}'


def _colour(hue: int) -> str:
    return f"hsl({hue} 55% 55%)"


def _frontier(found: Evaluated, plans: Sequence[Plan], cluster: Cluster) -> str:
    """Memory against step time of the candidates: the frontier dark, the rest pale, the memory of a device a line."""
    room = cluster.device.capacity / 1e9
    gigabytes, seconds = found.memory / 1e9, found.seconds
    shown = (gigabytes < 2 * room) & (seconds < 4 * plans[0].prediction.step_s)
    front = [i for i in pareto(gigabytes, seconds) if shown[i]]
    cloud = np.flatnonzero(shown)
    cloud = cloud[:: max(1, len(cloud) // _DOTS)]
    top, left = 2 * room, plans[0].prediction.step_s * 0.9
    right = float(seconds[shown].max()) * 1.02 if shown.any() else left * 2

    def circle(layout: Layout, step: float, held: float, kind: str, radius: float) -> str:
        x = _EDGE + (step - left) / (right - left) * (_WIDTH - _EDGE - 10)
        y = 10 + (1 - held / top) * (_HEIGHT - 50)
        said = escape(f"{layout.describe()}: {step:.3g} s, {held:.1f} GB")
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{said}</title></circle>'

    def dot(i: int, kind: str, radius: float) -> str:
        return circle(found.layout(i), float(seconds[i]), float(gigabytes[i]), kind, radius)

    def ring(plan: Plan) -> str:
        return circle(plan.layout, plan.prediction.step_s, plan.prediction.memory_gb, "plan", 6)

    level = 10 + (1 - room / top) * (_HEIGHT - 50)
    marks = [
        f'<line x1="{_EDGE}" x2="{_WIDTH - 10}" y1="{level:.1f}" y2="{level:.1f}" class="room"/>',
        f'<text x="{_EDGE + 4}" y="{level - 5:.1f}">{room:.1f} GB of one {escape(cluster.device.name)}</text>',
        f'<text x="{_EDGE}" y="{_HEIGHT - 12}">{left:.3g} s per step</text>',
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 12}" text-anchor="end">{right:.3g} s</text>',
        f'<text x="4" y="20">{top:.0f} GB</text><text x="4" y="{_HEIGHT - 36}">0 GB</text>',
    ]
    dots = [dot(int(i), "cloud", 2) for i in cloud] + [dot(i, "front", 4) for i in front]
    rings = [ring(plan) for plan in plans]
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(marks + dots + rings)}</svg>'


def pareto(memory: Sequence[float] | np.ndarray, seconds: Sequence[float] | np.ndarray) -> list[int]:
    """Positions of the candidates that no other beats in both, fastest first."""
    chosen: list[int] = []
    least = float("inf")
    for i in np.lexsort((np.asarray(memory), np.asarray(seconds))):
        if memory[i] < least:
            least = float(memory[i])
            chosen.append(int(i))
    return chosen


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">@GENERATOR@<title>@TITLE@</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<style>
:root { color-scheme: light dark; --back: #fff; --ink: #1c2330; --line: #dfe3ea; --pale: #9fb3cc; }
@media (prefers-color-scheme: dark) { :root { --back: #14181f; --ink: #e6eaf0; --line: #2b3240; --pale: #4b5c75; } }
body { margin: 18px; background: var(--back); color: var(--ink); font: 14px/1.4 system-ui, sans-serif; }
h1 { font-size: 20px; } h2 { font-size: 16px; margin-top: 28px; }
table { border-collapse: collapse; }
td, th { padding: 5px 9px; border-bottom: 1px solid var(--line); text-align: left; }
.bar { display: flex; width: 150px; height: 12px; border-radius: 3px; overflow: hidden; } .bar i { display: block; }
td { font-variant-numeric: tabular-nums; } td:not(:first-child):not(:last-child) { white-space: nowrap; }
.legend { margin: 6px 0; } .legend span { margin-left: 12px; white-space: nowrap; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 4px; }
svg { width: 100%; max-width: 900px; } svg text { fill: var(--ink); font-size: 12px; }
.cloud { fill: var(--pale); background: var(--pale); opacity: .5; }
.plan { fill: transparent; stroke: var(--ink); stroke-width: 1.5; outline: 1.5px solid var(--ink); }
svg .plan { outline: none; }
.front { fill: #d2542c; background: #d2542c; } .room { stroke: var(--ink); stroke-dasharray: 5 4; }
iframe { width: 100%; border: 1px solid var(--line); border-radius: 6px; }
</style></head><body>
@BODY@
</body></html>
"""
