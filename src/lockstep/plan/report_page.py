"""The HTML report of a search: the plans with their parts, the search frontier, and the best plan's pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from lockstep.plan.cluster import Cluster, cluster_of
from lockstep.plan.coefficients import Coefficients
from lockstep.plan.evaluate import evaluate
from lockstep.plan.former import GENERATOR
from lockstep.plan.frontier import frontier
from lockstep.plan.per_stage import plan_simulation
from lockstep.plan.pins import Pins, check_pins
from lockstep.plan.planfile import Plan
from lockstep.plan.report import TERMS, tight
from lockstep.plan.simulate import Simulation
from lockstep.plan.timeline import save_timeline, timeline_html
from lockstep.quantities import counted, duration

COLOURS = {
    "compute": "#4e79a7", "bubble": "#bab0ac", "tp communication": "#f28e2b", "cp communication": "#e15759",
    "ep communication": "#59a14f", "pp communication": "#76d0e0", "dp communication": "#b07aa1",
    "offload": "#9c755f", "optimizer": "#edc948", "host": "#ff9da7",
    "weights": "#4e79a7", "gradients": "#f28e2b", "activations": "#59a14f", "working": "#76d0e0",
    "logits": "#e15759", "buffers": "#b07aa1", "margin": "#bab0ac",
}  # fmt: skip
"""Of the parts of a step and of the memory: no two of one bar can be taken for one another."""


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
    facts = _facts(run, best)
    pipeline = escape(timeline_html(run, best.layout.describe(), "s", "GB", "memory", facts), quote=True)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{counted(best.batch.sequences, 'sequence')} of {counted(best.batch.seq, 'token')} per step, "
        f"{len(found.seconds):,} candidates, "
        f"{int((found.memory <= place.device.capacity).sum()):,} fit in memory.</p>",
        f'<div class="wide">{_plans(plans)}</div>',
        _legend("time", _names(plan.prediction.parts for plan in plans)),
        _legend("memory", _names(plan.prediction.memory_parts for plan in plans)),
        f"<p>{'<br>'.join(map(escape, TERMS))}</p>",
        *(f'<p class="note">{escape(line)}</p>' for line in tight(plans, place)),
        "<h2>Search frontier</h2>",
        '<p class="legend"><span><i class="front"></i>no other takes less memory and less time</span>'
        '<span><i class="cloud"></i>other candidates</span><span><i class="plan"></i>the plans above</span>'
        "<span>above the dashed line: does not fit</span></p>",
        f'<div class="wide">{frontier(found, plans, place)}</div>',
        "<h2>Pipeline of the best plan</h2>",
        f'<iframe title="pipeline" srcdoc="{pipeline}"></iframe>',
    ]
    head = _PAGE.replace("@GENERATOR@", GENERATOR).replace("@TITLE@", escape(title))
    Path(page).write_text(head.replace("@BODY@", "\n".join(parts)), "utf-8")


def _facts(run: Simulation, plan: Plan) -> dict[str, str]:
    """The head of the picture. Its own bubble isn't there: where only the beginning and the end of a step are drawn,
    its share is larger than that of the step."""
    drawn, whole = run.table.micro_batches, plan.layout.micro_batches(plan.batch)
    facts = {
        "stages": f"{run.table.stages} of {run.table.chunks} chunks each"
        if run.table.chunks > 1
        else f"{run.table.stages}",
        "micro-batches": f"{whole}" if drawn == whole else f"{whole}, of which {drawn} are drawn (the middle repeats)",
        "step": duration(plan.prediction.step_s),
        "bubble of the step": f"{100 * plan.prediction.bubble:.1f} %",
        "peak memory": f"{plan.prediction.memory_gb:.1f} GB",
    }
    return facts | ({} if drawn == whole else {"length of the picture": duration(run.makespan)})


def _plans(plans: Sequence[Plan]) -> str:
    head = ("layout", "step", "tokens/s", "MFU", "bubble", "time", "memory", "why not")
    rows = []
    for plan in plans:
        it = plan.prediction
        cells = (
            escape(plan.layout.describe()),
            duration(it.step_s),
            f"{it.tokens_s:,.0f}",
            f"{100 * it.mfu:.1f} %",
            f"{100 * it.bubble:.1f} %",
            _bar({name: (value, duration(value)) for name, value in it.parts.items()}, it.step_s),
            _bar({name: (value, f"{value:.1f} GB") for name, value in it.memory_parts.items()}, it.memory_gb)
            + f"{it.memory_gb:.1f} GB{_by_stage(it.stage_memory_gb)}",
            escape(plan.worse or "best"),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{''.join(rows)}</table>"


def _by_stage(held: Sequence[float]) -> str:
    """What a rank of each stage takes, where there are several."""
    return f"<br>by stage: {' '.join(f'{gigabytes:.1f}' for gigabytes in held)}" if len(held) > 1 else ""


def _names(parts: Iterable[Mapping[str, float]]) -> list[str]:
    """Of the parts that some plan has."""
    return list(dict.fromkeys(name for of_plan in parts for name, value in of_plan.items() if value))


def _legend(what: str, names: Sequence[str]) -> str:
    keys = "".join(f'<span><i style="background:{COLOURS[name]}"></i>{escape(name)}</span>' for name in names)
    return f'<p class="legend"><b>{what}</b>{keys}</p>'


def _bar(parts: Mapping[str, tuple[float, str]], whole: float) -> str:
    """A stacked bar; hovering over a part names it. parts: how much, and how to say it."""
    pieces = [
        f'<i title="{escape(f"{name}: {said}")}" style="width:{100 * value / whole:.1f}%;'
        f'background:{COLOURS[name]}"></i>'
        for name, (value, said) in parts.items()
        if value > 0.002 * whole
    ]
    return f'<span class="bar">{"".join(pieces)}</span>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">@GENERATOR@<title>@TITLE@</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<style>
:root { color-scheme: light dark; --back: #fff; --ink: #1c2330; --line: #dfe3ea; --pale: #9fb3cc; }
@media (prefers-color-scheme: dark) { :root { --back: #14181f; --ink: #e6eaf0; --line: #2b3240; --pale: #7288a8; } }
body { margin: 18px; background: var(--back); color: var(--ink); font: 14px/1.4 system-ui, sans-serif; }
h1 { font-size: 20px; } h2 { font-size: 16px; margin-top: 28px; } h1, p { overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; min-width: 1160px; }
td, th { padding: 5px 9px; border-bottom: 1px solid var(--line); text-align: left; }
.bar { display: flex; width: 150px; height: 12px; border-radius: 3px; overflow: hidden; } .bar i { display: block; }
td:first-child { min-width: 210px; }
td { font-variant-numeric: tabular-nums; } td:not(:first-child):not(:last-child) { white-space: nowrap; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 12px; margin: 6px 0; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 4px; }
.note { border-left: 3px solid #d2542c; padding-left: 9px; }
svg { width: 100%; min-width: 640px; max-width: 900px; }
svg text { fill: var(--ink); font-size: 12px; paint-order: stroke; stroke: var(--back); stroke-width: 4px; }
.cloud { fill: var(--pale); background: var(--pale); opacity: .5; }
.plan { fill: transparent; stroke: var(--ink); stroke-width: 1.5; outline: 1.5px solid var(--ink); }
svg .plan { outline: none; }
.front { fill: #d2542c; background: #d2542c; } .room { stroke: var(--ink); stroke-dasharray: 5 4; }
.tick { stroke: var(--line); }
iframe { width: 100%; height: 400px; border: 1px solid var(--line); border-radius: 6px; }
</style></head><body>
@BODY@
<script>
"use strict";
const frame = document.querySelector("iframe");          // as high as its page, up to what is then scrolled
const fit = () => { frame.style.height = Math.min(frame.contentDocument.body.scrollHeight + 2, 960) + "px"; };
frame.addEventListener("load", fit); addEventListener("resize", () => setTimeout(fit, 100));
</script>
</body></html>
"""
