"""Runs the sides of `lockstep bench compile` and makes its report."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.bench.compiling.side import LENGTH, SEQUENCES, levels, shape
from lockstep.bench.machine import describe
from lockstep.bench.report import Report
from lockstep.bench.step_client import Side, interpreter, version
from lockstep.bench.train import SAME, write_inputs
from lockstep.bench.turns import Spread, take_turns
from lockstep.errors import LockstepError

LEVELS = ("O0", "O1", "O2")
_PATIENCE = 120
"""Seconds that a peer may take for one cold compilation."""

_WARM = 3
"""Processes that start from the cache: what memory touched for the first time costs moves by 0.1 s."""

_PASSES = 20
"""Of a block in one turn."""

Progress = Callable[[str], None]
Times = dict[str, float]
"""Seconds of compiling and of a step, and the first loss."""
Way = Callable[[int, str], Times]
"""Of the number of layers and the directory of the compile cache."""


def compile_report(
    depths: Sequence[int], peers: Sequence[str], rounds: int, progress: Progress, command: str, where: Path
) -> Report:
    """Compile times of every level and peer at these depths, cold and from the cache; step times of all, the levels'
    taking turns; a chain of small operators sunk and eager. where: the environments of `benchmarks/peers.sh`."""
    sides = {name: _ways(name, where) for name in (*LEVELS, *peers)}
    found: dict[str, dict[int, list[Times]]] = {}
    for name, way in sides.items():
        found[name] = {}
        for depth in depths:
            if name in LEVELS or _worth(found[name], depth):
                progress(f"{_name(name)}, {depth} layers")
                found[name][depth] = _cold_and_warm(way, depth, _WARM if name != "O0" else 0)
    if "mindspore" in found:
        _check_losses(found["O0"], found["mindspore"])
    progress("steps")
    steps = {depth: _steps(depth, rounds) for depth in depths}
    chain, block = _chain(rounds), _block(rounds)
    data: dict[str, Any] = {**found, "chain": chain, "block": block}
    data["steps"] = {depth: {name: s.median for name, s in one.items()} for depth, one in steps.items()}
    columns = ("", *(f"{depth} layers" for depth in depths))
    packages = ("transformers",) if "torch" in peers else ()
    notes = [*_notes(found, depths), _chain_note(chain), _block_note(block)]
    if "mindspore" in peers:
        notes.append(f"MindSpore {version(interpreter('mindspore', where), 'mindspore')}: a step as one graph.")
    rows = (*_rows(found, steps, depths), _block_row(block, depths))
    return Report("compile", "Compile levels", command, describe(*packages), columns, rows, tuple(notes), data)


def _rows(
    found: dict[str, dict[int, list[Times]]], steps: dict[int, dict[str, Spread]], depths: Sequence[int]
) -> Iterator[tuple[str, ...]]:
    for name, by_depth in found.items():
        cells = [" / ".join(f"{one['compile']:.2f}" for one in by_depth.get(depth, ())) or "-" for depth in depths]
        yield (f"compile {_name(name)}, s", *cells)
    for level in LEVELS:
        yield (f"step {level}, ms", *(_milliseconds(steps[depth], level) for depth in depths))
    for name in found.keys() - set(LEVELS):
        cells = [f"{1e3 * by[depth][0]['step']:.1f}" if depth in (by := found[name]) else "-" for depth in depths]
        yield (f"step {_name(name)}, ms", *cells)


def _notes(found: dict[str, dict[int, list[Times]]], depths: Sequence[int]) -> list[str]:
    few, many = min(depths), max(depths)
    growth = [f"{side} {found[side][many][0]['compile'] / found[side][few][0]['compile']:.2f}x" for side in LEVELS[1:]]
    kept = [
        f"{side} " + ", ".join(f"{cold['compile'] / max(warm['compile'], 1e-3):.0f}x" for cold, warm in by.values())
        for side, by in ((_name(name), found[name]) for name in found if name != "O0")
    ]
    notes = [
        f"compile: cold / from the cache of the process before (median of {_WARM}), each in a process of its own; what "
        "a first step takes longer than later ones is part of it. An eager step goes before, but for MindSpore.",
        f"{many} layers against {few}, cold: {', '.join(growth)} (target: at most 1.5x).",
        f"less from the cache, by depth: {'; '.join(kept)} (target: at least 10x).",
        f"step: {SEQUENCES} sequences of {LENGTH} tokens, float32; levels take turns, in brackets O0 / this; peers' "
        "steps are of their own processes.",
    ]
    for name, by in found.items():
        if left := [str(depth) for depth in depths if depth not in by]:
            notes.append(f"{_name(name)} was not run with {', '.join(left)} layers: it would take over {_PATIENCE} s.")
    return notes


def _worth(found: dict[int, list[Times]], depth: int) -> bool:
    """Whether a peer is run at this depth: its compile time grows with it, and nobody waits for ever."""
    if not found:
        return True
    last = max(found)
    return depth / last * found[last][0]["compile"] <= _PATIENCE


def _cold_and_warm(way: Way, depth: int, runs: int) -> list[Times]:
    """A process with an empty cache and, of so many after it, the one with the median compile time."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as cache:
        cold = way(depth, cache)
        warm = sorted((way(depth, cache) for _ in range(runs)), key=lambda one: one["compile"])
        return [cold, *warm[runs // 2 : runs // 2 + 1]]


def _ways(name: str, where: Path) -> Way:
    """How a side is measured: one process, given depth and cache directory."""
    if name == "mindspore":
        return partial(_mindspore, interpreter(name, where))
    return partial(_side, name)


def _mindspore(python: str, layers: int, cache: str) -> Times:
    script = Path(__file__).parent.parent / "peers" / "mindspore_train.py"
    with tempfile.TemporaryDirectory() as scratch:
        at = Path(scratch)
        write_inputs(shape(layers), (SEQUENCES, LENGTH), at)
        arguments = [str(at / "model"), str(at / "tokens.npy"), "float32", "graph", "1e-4", cache]
        side = Side.started("mindspore", [python, str(script), *arguments])
        try:
            first, *rest = [side.step() for _ in range(6)]
        finally:
            side.end()
    usual = statistics.median(rest)
    return {"compile": max(first - usual, 0.0), "step": usual, "loss": side.losses[0]}


def _check_losses(ours: dict[int, list[Times]], theirs: dict[int, list[Times]]) -> None:
    for depth, times in theirs.items():
        apart = abs(times[0]["loss"] - ours[depth][0]["loss"])
        if not apart <= SAME:
            raise LockstepError(f"with {depth} layers the first losses are {apart:.4f} apart: not the same work")


def _side(level: str, layers: int, cache: str) -> Times:
    command = [sys.executable, "-m", "lockstep.bench.compiling.side", level, str(layers), cache]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    answer: Times = json.loads(done.stdout.splitlines()[-1])
    return answer


def _steps(layers: int, rounds: int) -> dict[str, Spread]:
    """Seconds of a step by level; the levels take turns."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as cache:
        sides = {level: levels(shape(layers), level, Path(cache), torch.float32).compiled() for level in LEVELS}
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
    from lockstep.compile.sink import sink

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


def _block(rounds: int) -> dict[str, float]:
    """Seconds of a block's forward and backward at O0, and in plain eager PyTorch around the same operators, in turn;
    ratio: the median of plain / O0 over the rounds."""
    import time

    from lockstep.bench.compiling.plain_block import PlainBlock
    from lockstep.bench.turns import ratios
    from lockstep.model import random_decoder
    from lockstep.ops import Packed, operators

    config, ops = shape(1), operators("bitwise")
    decoder, batch = random_decoder(config, 0).train(), Packed.of([LENGTH] * SEQUENCES)
    ours, table = decoder.layers[0], decoder.rope_tables(batch)[0]
    plain = PlainBlock(config, ours, batch.starts, batch.positions, table)
    x = torch.randn(SEQUENCES * LENGTH, config.hidden_size, generator=torch.Generator().manual_seed(0))
    forms: dict[str, tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]] = {
        "O0": (ours, lambda x: ours(ops, x, batch, table, None, torch.float32)),
        "plain": (plain, plain),
    }

    parameters = {form: list(module.parameters()) for form, (module, _) in forms.items()}

    def passes(form: str) -> list[torch.Tensor]:
        given = x.clone().requires_grad_()
        y = forms[form][1](given)
        y.backward(torch.ones_like(y))
        gradients = [parameter.grad for parameter in parameters[form]]
        for parameter in parameters[form]:
            parameter.grad = None
        assert given.grad is not None
        return [y.detach(), given.grad, *(g for g in gradients if g is not None)]

    def timed(form: str) -> float:
        begun = time.perf_counter()
        for _ in range(_PASSES):
            passes(form)
        return (time.perf_counter() - begun) / _PASSES

    found = {form: passes(form) for form in forms}
    assert all(any(torch.equal(a, b) for b in found["plain"]) for a in found["O0"]), "not the same bits"
    times = take_turns({form: partial(timed, form) for form in forms}, 3 * rounds, warmup=2)
    spreads = {form: Spread.of(seconds).median for form, seconds in times.items()}
    return {**spreads, "ratio": ratios(times["O0"], times["plain"]).median}


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    import time

    begun = time.perf_counter()
    answer = call()
    return time.perf_counter() - begun, answer


def _name(side: str) -> str:
    return {"torch": "torch.compile", "mindspore": "MindSpore"}.get(side, side)


def _chain_note(chain: dict[str, float]) -> str:
    return (
        f"a chain of 60 small operators: {chain['eager'] * 1e6:.0f} us eager, {chain['sunk'] * 1e6:.0f} us sunk, "
        f"{chain['eager'] / chain['sunk']:.2f}x (target: at least 1.4x)."
    )


def _block_row(block: dict[str, float], depths: Sequence[int]) -> tuple[str, ...]:
    cell = f"{block['O0'] * 1e3:.3f} ({block['ratio']:.2f}x)"
    return ("block O0, ms", cell, *[""] * (len(depths) - 1))


def _block_note(block: dict[str, float]) -> str:
    return (
        f"block O0: forward and backward of {SEQUENCES * LENGTH} tokens, in brackets plain eager PyTorch that calls "
        f"the same raw operators ({block['plain'] * 1e3:.3f} ms) / this, in turn (target: no slower)."
    )


def _milliseconds(found: dict[str, Spread], level: str) -> str:
    own, eager = found[level].median, found["O0"].median
    return f"{own * 1e3:.1f}" + ("" if level == "O0" else f" ({eager / own:.2f}x)")
