"""The comparison: every side under the same loads, in turn within one run."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.bench.limit import Limit
from lockstep.bench.machine import Machine
from lockstep.bench.report import Report
from lockstep.bench.serving.load import Load, ask
from lockstep.bench.serving.side import Server

Progress = Callable[[str], None]
_QUICK = 60.0
"""Seconds of a start below which a second one is measured, from caches that are warm for certain."""


@dataclass(frozen=True)
class Sizes:
    """clients: how many ask at once, a load for each. prompt, output: tokens. long_prompt: of the prefill's load."""

    clients: tuple[int, ...] = (1, 8, 32)
    prompt: int = 128
    output: int = 64
    long_prompt: int = 1024
    rounds: int = 3


def compare(
    servers: Sequence[Server], vocabulary: int, sizes: Sizes, machine: Machine, limit: Limit, command: str,
    say: Progress,
) -> Report:  # fmt: skip
    """Start every server, then give each the same loads in turn; the first one is what the others are compared with."""
    running: list[Server] = []
    try:
        for server in servers:
            say(f"starting {server.side.name}")
            running.append(server)
            server.start()
            if server.start_seconds < _QUICK:
                server.start_again()
            _warm(server, vocabulary, sizes)
            server.pause()
        loads = _rounds(servers, vocabulary, sizes, say)
        peaks = {server.side.name: server.peak_memory() for server in servers}
    finally:
        for server in running:
            server.end()
    starts = {server.side.name: server.start_seconds for server in servers}
    return _report(loads, starts, peaks, sizes, machine, limit, command)


Loads = dict[str, dict[str, list[Load]]]
"""By load, then by side: one per round."""


def _warm(server: Server, vocabulary: int, sizes: Sizes) -> None:
    """Whatever a server makes at first use is made before anything counts."""
    for clients in sizes.clients:
        ask(server.url, server.body, _prompts(f"warm {clients}", clients, sizes.prompt, vocabulary), 4)


def _rounds(servers: Sequence[Server], vocabulary: int, sizes: Sizes, say: Progress) -> Loads:
    loads: Loads = {}
    for turn in range(sizes.rounds):
        for name, clients, prompt, output in _plan(sizes):
            for server in servers:
                say(f"round {turn + 1} of {sizes.rounds}: {name}, {server.side.name}")
                # The same prompts for every side, new ones each round: no cache may have them.
                prompts = _prompts(f"{turn} {name}", clients, prompt, vocabulary)
                server.go_on()
                load = ask(server.url, server.body, prompts, output)
                server.pause()
                loads.setdefault(name, {}).setdefault(server.side.name, []).append(load)
    return loads


def _plan(sizes: Sizes) -> list[tuple[str, int, int, int]]:
    plan = [(f"{n} client{'s' if n > 1 else ''}", n, sizes.prompt, sizes.output) for n in sizes.clients]
    return [*plan, ("long prompt", 1, sizes.long_prompt, 1)]


def _prompts(seed: str, count: int, length: int, vocabulary: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(100, vocabulary) for _ in range(length)] for _ in range(count)]


def _report(
    loads: Loads, starts: dict[str, float], peaks: dict[str, int], sizes: Sizes, machine: Machine, limit: Limit,
    command: str,
) -> Report:  # fmt: skip
    sides = list(starts)
    rows: list[tuple[str, ...]] = []
    for name, by_side in loads.items():
        if name == "long prompt":
            rates = {s: [sizes.long_prompt / load.first[0] for load in found] for s, found in by_side.items()}
            rows.append(_row(f"prefill of {sizes.long_prompt}, tokens/s", rates, more_is_better=True))
            continue
        rows.append(_row(f"{name}: output tokens/s", {s: [x.rate for x in f] for s, f in by_side.items()}, True))
        first = {s: [x.median_first * 1e3 for x in f] for s, f in by_side.items()}
        rows.append(_row(f"{name}: time to first token, ms", first, False))
        for label, quantile in (("median", 0.5), ("p99", 0.99)):
            gaps = {s: [x.gap(quantile) * 1e3 for x in f] for s, f in by_side.items()}
            rows.append(_row(f"{name}: between tokens, {label}, ms", gaps, False))
    rows.append(_row("start to first answer, s", {s: [value] for s, value in starts.items()}, False))
    rows.append(_row("peak memory, MiB", {s: [value / 2**20] for s, value in peaks.items()}, False))
    note = (
        f"{sizes.prompt} random tokens in, {sizes.output} out, greedy; {sizes.rounds} rounds in turn, medians "
        "(lowest to highest). In brackets: how many times better ours is. A start finds the caches that the one before "
        f"it left, where that took less than {_QUICK:.0f} s; else those of an earlier run."
    )
    return Report(
        "serve",
        "Serving beside peers",
        command,
        machine,
        ("", *sides),
        tuple(rows),
        (note, *_limits(loads, sizes, limit)),
        {**_data(loads, starts, peaks), "limit": vars(limit)},
    )


def _limits(loads: Loads, sizes: Sizes, limit: Limit) -> tuple[str, str]:
    """What the machine allows, and how much of it each side reaches."""
    prompt, answer = limit.prompt(sizes.prompt), limit.answer(sizes.prompt, sizes.output)
    most = {n: limit.rate(n, sizes.prompt, sizes.output) for n in sizes.clients}
    reached = []
    for (n, rate), by_side in zip(most.items(), loads.values(), strict=False):
        ours, *others = (
            (side, statistics.median(load.rate for load in found) / rate) for side, found in by_side.items()
        )
        shares = ", ".join([f"{ours[0]} {ours[1]:.0%}", *(f"{s} {x:.0%} (twice is {2 * x:.0%})" for s, x in others)])
        reached.append(f"{n} client{'s' if n > 1 else ''} {shares}")
    return (
        f"The limit of this machine: a prompt is {prompt / 1e9:.1f} GFLOP, its answer {answer / 1e9:.1f}; at the "
        f"matrix peak of {limit.peak / 1e9:.0f} GFLOP/s, and with the {limit.weights / 1e6:.0f} MB of weights read at "
        f"{limit.bandwidth / 1e9:.1f} GB/s in every step, no server gives more than "
        f"{' / '.join(f'{rate:.0f}' for rate in most.values())} output tokens/s to "
        f"{' / '.join(map(str, most))} clients.",
        f"Of that limit: {'; '.join(reached)}. More than 100 % cannot be.",
    )


def _row(label: str, values: dict[str, list[float]], more_is_better: bool) -> tuple[str, ...]:
    ours = next(iter(values))
    cells = [label]
    for side, found in values.items():
        middle = statistics.median(found)
        cell = f"{middle:.3g}" if middle < 100 else f"{middle:.0f}"
        if len(found) > 1:
            cell += f" ({min(found):.3g} to {max(found):.3g})"
        if side != ours and middle and statistics.median(values[ours]):
            pairs = zip(values[ours], found, strict=True)
            cell += f" [{statistics.median(a / b if more_is_better else b / a for a, b in pairs):.2f}x]"
        cells.append(cell)
    return tuple(cells)


def _data(loads: Loads, starts: dict[str, float], peaks: dict[str, int]) -> dict[str, Any]:
    told = {
        name: {
            side: [{"rate": x.rate, "first": x.median_first, "gap": x.gap(0.5), "gap_p99": x.gap(0.99)} for x in found]
            for side, found in by_side.items()
        }
        for name, by_side in loads.items()
    }
    return {"loads": told, "start_seconds": starts, "peak_bytes": peaks}
