"""Continuous against static batching on one engine, and the share of a step that is not the model's."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lockstep.bench.machine import Machine
from lockstep.bench.report import Report
from lockstep.bench.turns import Spread, ratios, take_turns

if TYPE_CHECKING:
    from lockstep.model import Model


@dataclass(frozen=True)
class Mix:
    """Requests as a service sees them: (prompt, tokens to generate). Lengths are drawn evenly on a logarithmic scale;
    half of the prompts begin with the same `shared` tokens."""

    requests: int = 64
    prompt: tuple[int, int] = (8, 1500)
    output: tuple[int, int] = (4, 256)
    shared: int = 512
    at_once: int = 32

    def draw(self, seed: str, vocabulary: int) -> list[tuple[list[int], int]]:
        draw = random.Random(seed)
        prefix = _tokens(draw, self.shared, vocabulary)
        drawn = []
        for i in range(self.requests):
            prompt = _tokens(draw, _between(draw, self.prompt), vocabulary)
            if i % 2:
                prompt = [*prefix, *prompt][: max(self.prompt[1], self.shared + 8)]
            drawn.append((prompt, _between(draw, self.output)))
        return drawn


def batching(model: Model, mix: Mix, rounds: int, machine: Machine, command: str) -> Report:
    """Run the mix both ways in turn, on an engine of its own each time so that no cache helps the second."""
    work = mix.draw(command, model.config.vocab_size)
    sides = {name: partial(_serve, model, work, mix, name == "static") for name in ("continuous", "static")}
    found = take_turns(sides, rounds, warmup=0)
    rows = [
        (name, *_cells([tokens for tokens, _ in runs]), *_cells([100 * share for _, share in runs]))
        for name, runs in found.items()
    ]
    gain = ratios([1 / r for r, _ in found["continuous"]], [1 / r for r, _ in found["static"]])
    note = (
        f"{mix.requests} requests, {mix.at_once} at once, {mix.prompt[0]} to {mix.prompt[1]} tokens in and "
        f"{mix.output[0]} to {mix.output[1]} out, half with a common prefix of {mix.shared}. Static: the next "
        f"{mix.at_once} begin when the last of these is done. Continuous is {gain.median:.2f}x static "
        f"({gain.low:.2f} to {gain.high:.2f})."
    )
    columns = ("batching", "output tokens/s", "scheduler and sampling, % of a step")
    data = {name: [{"rate": r, "share": s} for r, s in runs] for name, runs in found.items()} | {"ratio": gain.median}
    return Report("batching", "Continuous batching", command, machine, columns, tuple(rows), (note,), data)


def _serve(model: Model, work: Sequence[tuple[list[int], int]], mix: Mix, static: bool) -> tuple[float, float]:
    """(output tokens per second, the share of the time outside the forward pass)."""
    from lockstep.serve import Engine, SamplingParams

    engine = Engine(model, max_running=mix.at_once)
    inside = _clock(engine)
    began = time.perf_counter()
    for at in range(0, len(work), mix.at_once if static else len(work)):
        for prompt, tokens in work[at : at + mix.at_once] if static else work:
            engine.add_request(prompt, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
        while engine.has_work():
            engine.step()
    seconds = time.perf_counter() - began
    return sum(tokens for _, tokens in work) / seconds, 1 - inside[0] / seconds


def _clock(engine: object) -> list[float]:
    """Seconds spent in the engine's forward passes from now on, in a list of one."""
    runner = engine._runner  # type: ignore[attr-defined]
    run, total = runner.run, [0.0]

    def timed(*arguments: object) -> object:
        began = time.perf_counter()
        try:
            return run(*arguments)
        finally:
            total[0] += time.perf_counter() - began

    runner.run = timed
    return total


def _cells(values: list[float]) -> tuple[str]:
    spread = Spread.of(values)
    return (f"{spread.median:.1f} ({spread.low:.1f} to {spread.high:.1f})",)


def _tokens(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(count)]


def _between(draw: random.Random, ends: tuple[int, int]) -> int:
    """A whole number, its logarithm evenly drawn."""
    low, high = ends
    return min(high, int(low * (high / low) ** draw.random()))
