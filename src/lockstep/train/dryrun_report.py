"""A dry-run as text for a person, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from lockstep.plan.memory import MARGIN, process_bytes
from lockstep.plan.watch import OperatorCost
from lockstep.quantities import counted, operations, parameters, size
from lockstep.train.dryrun import DryRun

_SMALL = 0.002
"""Operators below this share of both FLOPs and bytes are summed up in one line."""


def dry_run_text(found: DryRun, planned: float | None = None) -> str:
    """What `lockstep dryrun` prints. planned: bytes of the rank's process by the closed form of plans."""
    where = f"rank {found.rank} of {found.mesh.describe()}: " if found.mesh.size > 1 else ""
    lines = [
        f"{where}{parameters(found.parameters)} parameters; a step of {counted(found.micro_batches, 'micro-batch')} "
        f"of {found.tokens:,} tokens: {operations(found.flops)}",
        f"before the step  weights {size(found.weights)}, optimizer {size(found.optimizer)}",
        f"peak             {size(found.peak.bytes)}, in the {found.peak.where} ({found.peak.operator})",
        f"                 {shares(found.peak.kinds)}",
        f"process          {size(process_bytes(found.peak.bytes))}: the peak, {100 * MARGIN:g} % that an allocator "
        f"loses, and the runtime",
        *([] if planned is None else [f"as planned       {size(planned)} for this rank's process"]),
        *_sent(found),
        "",
        f"{'operator':34s} {'calls':>9s} {'operations':>13s} {'bytes':>10s}",
    ]
    return "\n".join(lines + _operators(found.operators))


def _sent(found: DryRun) -> list[str]:
    """What the rank sends along each axis of its mesh."""
    parts = [f"{axis} {t.calls:,} messages, {size(t.bytes)}" for axis, t in found.traffic.items()]
    return [f"sends            {'; '.join(parts)}"] if parts else []


def _operators(costs: Mapping[str, OperatorCost]) -> list[str]:
    flops, moved = sum(c.flops for c in costs.values()), sum(c.bytes for c in costs.values())
    ordered = sorted(costs.items(), key=lambda item: (-item[1].flops, -item[1].bytes))
    shown = [(n, c) for n, c in ordered if c.flops > _SMALL * flops or c.bytes > _SMALL * moved]
    rest = [c for n, c in ordered if (n, c) not in shown]
    if rest:
        other = OperatorCost(sum(c.calls for c in rest), sum(c.flops for c in rest), sum(c.bytes for c in rest))
        shown.append((f"{len(rest)} others", other))
    return [f"{name:34s} {c.calls:9,d} {operations(c.flops):>13s} {size(c.bytes):>10s}" for name, c in shown]


def shares(kinds: Mapping[str, int]) -> str:
    """Bytes by kind, the largest first."""
    return ", ".join(f"{name} {size(n)}" for name, n in sorted(kinds.items(), key=lambda item: -item[1]))


def dry_run_json(found: DryRun, levels: Sequence[object] = ()) -> str:
    """The same and the live bytes after every operator. levels: dataclasses of what compile levels make of it."""
    content = {
        "parameters": found.parameters, "micro_batches": found.micro_batches, "tokens": found.tokens,
        "rank": found.rank, "flops": found.flops, "weights": found.weights, "optimizer": found.optimizer,
        "peak": vars(found.peak), "process_bytes": int(process_bytes(found.peak.bytes)),
        "operators": {name: vars(c) for name, c in found.operators.items()},
        "sent": {axis: vars(t) for axis, t in found.traffic.items()},
        "compile": [vars(one) for one in levels], "live_bytes": found.history,
    }  # fmt: skip
    return json.dumps(content, indent=1)
