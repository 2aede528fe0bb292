"""Runs the sides of `lockstep bench compile` and makes its report."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.bench.compiling.side import SEQUENCES, levels, shape
from lockstep.bench.machine import describe
from lockstep.bench.report import Report
from lockstep.bench.turns import Spread, take_turns

LEVELS = ("O0", "O1", "O2")
Progress = Callable[[str], None]


def compile_report(
    depths: Sequence[int], peers: Sequence[str], rounds: int, progress: Progress, command: str
) -> Report:
    """Compile times of every level and peer at these depths, cold and from the cache; step times of the levels, which
    take turns; a chain of small operators sunk and eager."""
    rows, data = [], dict[str, Any]()
    for side in (*LEVELS, *peers):
        times = {}
        for depth in depths:
            progress(f"{side}, {depth} layers")
            with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as cache:
                times[depth] = [_side(side, depth, cache) for _ in range(1 if side == "O0" else 2)]
        data[side] = times
        rows.append((f"compile {_name(side)}, s", *(_cold_and_warm(times[depth]) for depth in depths)))
    progress("steps")
    steps = {depth: _steps(depth, rounds) for depth in depths}
    data["steps"] = {depth: {name: s.median for name, s in found.items()} for depth, found in steps.items()}
    for level in LEVELS:
        rows.append((f"step {level}, ms", *(_milliseconds(steps[depth], level) for depth in depths)))
    chain = _chain(rounds)
    data["chain"] = chain
    few, many = min(depths), max(depths)
    growth = [f"{side} {data[side][many][0]['compile'] / data[side][few][0]['compile']:.2f}x" for side in ("O1", "O2")]
    notes = (
        "compile: cold / from the cache of the process before, each in a process of its own; what a first step takes "
        "longer than later ones is part of it.",
        f"{many} layers against {few}, cold: {', '.join(growth)} (target: at most 1.5x).",
        f"a chain of 60 small operators: {chain['eager'] * 1e6:.0f} us eager, {chain['sunk'] * 1e6:.0f} us sunk, "
        f"{chain['eager'] / chain['sunk']:.2f}x (target: at least 1.4x).",
        f"step: {SEQUENCES} sequences, float32, levels take turns; in brackets O0 / this.",
    )
    columns = ("", *(f"{depth} layers" for depth in depths))
    packages = ("transformers",) if "torch" in peers else ()
    return Report("compile", "Compile levels", command, describe(*packages), columns, tuple(rows), notes, data)


def _side(level: str, layers: int, cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", "lockstep.bench.compiling.side", level, str(layers), cache]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _steps(layers: int, rounds: int) -> dict[str, Spread]:
    """Seconds of a step by level; the levels take turns."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as cache:
        sides = {level: levels(shape(layers), level, Path(cache), torch.float32).step for level in LEVELS}
        losses: dict[str, list[float]] = {level: [] for level in LEVELS}

        def timed(level: str) -> Callable[[], float]:
            def run() -> float:
                seconds, loss = _seconds(sides[level])
                losses[level].append(loss)
                return seconds

            return run

        found = take_turns({level: timed(level) for level in LEVELS}, rounds, warmup=2)
        assert losses["O0"] == losses["O1"] == losses["O2"], "the levels must give the same bits"
        return {level: Spread.of(seconds) for level, seconds in found.items()}


def _chain(rounds: int) -> dict[str, float]:
    """Seconds of a chain of small operators, eager and sunk, in turn."""
    from lockstep.compile import sink

    def chain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for _ in range(20):
            x = (x * 1.01 + 0.1).tanh()
        return (x,)

    x = torch.linspace(-1, 1, 256)
    sunk = sink(chain, x)
    assert torch.equal(sunk(x)[0], chain(x)[0])

    def many(function: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[[], float]:
        return lambda: _seconds(lambda: [function(x) for _ in range(100)])[0] / 100

    found = take_turns({"eager": many(chain), "sunk": many(sunk)}, 3 * rounds, warmup=2)
    return {name: Spread.of(seconds).median for name, seconds in found.items()}


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    import time

    begun = time.perf_counter()
    answer = call()
    return time.perf_counter() - begun, answer


def _name(side: str) -> str:
    return "torch.compile" if side == "torch" else side


def _cold_and_warm(times: list[dict[str, float]]) -> str:
    return " / ".join(f"{one['compile']:.2f}" for one in times)


def _milliseconds(found: dict[str, Spread], level: str) -> str:
    own, eager = found[level].median, found["O0"].median
    return f"{own * 1e3:.1f}" + ("" if level == "O0" else f" ({eager / own:.2f}x)")
