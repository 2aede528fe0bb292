"""A dry-run as text for a person, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from lockstep.plan.memory import MARGIN, process_bytes
from lockstep.plan.watch import OperatorCost
from lockstep.train.dryrun import DryRun

_SMALL = 0.002
"""Operators below this share of both FLOPs and bytes are summed up in one line."""


def dry_run_text(found: DryRun, planned: float | None = None) -> str:
    """What `lockstep dryrun` prints. planned: bytes of the rank's process by the closed form of plans."""
    where = f"rank {found.rank} of {found.mesh.describe()}: " if found.mesh.size > 1 else ""
    lines = [
        f"{where}{amount(found.parameters, 'kMBT').strip()} parameters; a step of {found.micro_batches} micro-batches "
        f"of {found.tokens:,} tokens: {amount(found.flops)}FLOP",
        f"before the step  weights {size(found.weights)}, optimizer {size(found.optimizer)}",
        f"peak             {size(found.peak.bytes)}, in the {found.peak.where} ({found.peak.operator})",
        f"                 {shares(found.peak.kinds)}",
        f"process          {size(process_bytes(found.peak.bytes))}: the peak, {100 * MARGIN:g} % that an allocator "
        f"loses, and the runtime",
        *([] if planned is None else [f"as planned       {size(planned)} for this rank's process"]),
        *_sent(found),
        "",
        f"{'operator':34s} {'calls':>9s} {'FLOP':>12s} {'bytes':>12s}",
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
    return [f"{name:34s} {c.calls:9,d} {amount(c.flops):>12s} {size(c.bytes):>12s}" for name, c in shown]


def shares(kinds: Mapping[str, int]) -> str:
    """Bytes by kind, the largest first."""
    return ", ".join(f"{name} {size(n)}" for name, n in sorted(kinds.items(), key=lambda item: -item[1]))


def size(count: float) -> str:
    """Bytes as a person reads them: powers of 1000."""
    for unit, worth in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= worth:
            return f"{count / worth:.4g} {unit}"
    return f"{count / 1e3:.4g} kB"


def amount(count: float, letters: str = "kMGTP") -> str:
    """A number as a person reads it, up to its unit: 1.236 G, 450. letters: of thousands, millions and so on."""
    power = max((i for i in range(len(letters) + 1) if count >= 1000**i), default=0)
    return f"{count / 1000**power:.4g} {letters[power - 1] if power else ''}"


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
