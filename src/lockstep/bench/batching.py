"""Continuous against static batching on one engine, and the share of a step that is not the model's.

Static batching is what engines did before iteration-level scheduling (Orca: Yu et al., OSDI 2022, sections 2 and 3.1):
requests are put together into a batch in the order in which they come, the batch runs until its longest answer is
done, rows of answers that are done already are computed all the while and thrown away, and then the next batch begins.
Nothing is shared between prompts. In two things ours is better than those engines were: prompts are not padded to the
longest of their batch, and they are read in chunks.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.bench.machine import Machine
from lockstep.bench.report import Report
from lockstep.bench.turns import Spread, ratios

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.model import Model
    from lockstep.serve import Engine
    from lockstep.serve.params import Output
    from lockstep.serve.scheduler import Step


Asked = tuple[list[int], int]
_BEHIND = 16
"""Tokens behind the common prefix where the time to the first one is taken."""


@dataclass(frozen=True)
class Mix:
    """Requests as a service sees them: (prompt, tokens to generate). Lengths are drawn evenly on a logarithmic scale;
    half of the prompts begin with the same `shared` tokens."""

    requests: int = 64
    prompt: tuple[int, int] = (8, 1500)
    output: tuple[int, int] = (4, 256)
    shared: int = 512
    at_once: int = 32

    def draw(self, seed: str, vocabulary: int) -> list[Asked]:
        draw = random.Random(seed)
        prefix = _tokens(draw, self.shared, vocabulary)
        drawn = []
        for i in range(self.requests):
            prompt = _tokens(draw, _between(draw, self.prompt), vocabulary)
            if i % 2:
                prompt = [*prefix, *prompt][: max(self.prompt[1], self.shared + 8)]
            drawn.append((prompt, _between(draw, self.output)))
        return drawn


@dataclass(frozen=True)
class Way:
    """How requests become batches. whole_batches: the next `at_once` begin when the last of these is done. keeps_done:
    until then the rows of those that are done are computed as well."""

    whole_batches: bool = False
    keeps_done: bool = False
    prefix_cache: bool = True


WAYS = {
    "continuous": Way(),
    "static": Way(whole_batches=True, keeps_done=True, prefix_cache=False),
    "static, but done rows leave and prefixes are shared": Way(whole_batches=True),
}


@dataclass(frozen=True)
class Served:
    """One run of the mix. seconds: of its own steps. rate: tokens per second that were asked for. rows: tokens that
    went through the model. share: of the time, outside the forward pass. reading: of the time, with rows of prompts.
    answer: the median request's seconds until its answer is whole, all having come at the beginning."""

    seconds: float
    rate: float
    rows: int
    share: float
    reading: float
    answer: float


@dataclass(frozen=True)
class First:
    """Seconds from a request to its first token: nothing of its prompt is known, or the common prefix is."""

    cold: float
    warm: float


def batching(
    model: Model, mix: Mix, rounds: int, machine: Machine, command: str, progress: Callable[[float], None] | None = None
) -> Report:
    """Run the mix every way at the same time, on an engine of its own each. progress is told the part that is done."""
    work = mix.draw(command, model.config.vocab_size)
    played = []
    for i in range(rounds):
        sides = {name: _Side(model, work, mix, way) for name, way in WAYS.items()}
        for done in _serve(sides.values()):
            if progress is not None:
                progress((i + done) / rounds)
        played.append({name: side.served() for name, side in sides.items()})
    found = {name: [served[name] for served in played] for name in WAYS}
    ours = found["continuous"]
    rows, gains = [], {}
    for name, runs in found.items():
        gains[name] = gain = ratios([1 / run.rate for run in ours], [1 / run.rate for run in runs])
        times = "" if runs is ours else f"{gain.median:.2f}x ({gain.low:.2f} to {gain.high:.2f})"
        shares = _cell([100 * run.share for run in runs])
        rows.append((name, _cell([run.rate for run in runs]), times, f"{runs[0].rows:,}",
                     _cell([run.answer for run in runs]), shares))  # fmt: skip
    columns = ("batching", "output tokens/s", "continuous is", "rows computed", "median answer, s",
               "scheduler and sampling, % of a step")  # fmt: skip
    first = _first_tokens(model, mix, rounds)
    data: dict[str, Any] = {name: [vars(run) for run in runs] for name, runs in found.items()}
    data |= {"ratio": {name: gain.median for name, gain in gains.items()}, "first": vars(first)}
    notes = _notes(mix, work, found, first)
    return Report("batching", "Continuous batching", command, machine, columns, tuple(rows), notes, data)


def _notes(mix: Mix, work: Sequence[Asked], found: Mapping[str, list[Served]], first: First) -> tuple[str, ...]:
    asked = sum(len(prompt) for prompt, _ in work), sum(tokens for _, tokens in work)
    continuous, static = found["continuous"][0].rows, found["static"][0].rows
    shares = {name: statistics.median(run.reading for run in runs) for name, runs in found.items()}
    return (
        f"{mix.requests} requests, {mix.at_once} at once, {mix.prompt[0]} to {mix.prompt[1]} tokens in ({asked[0]:,} "
        f"together), {mix.output[0]} to {mix.output[1]} out ({asked[1]:,}), half with a common prefix of {mix.shared}. "
        "The ways take turns step by step, each on its own engine and clock, so that a busy moment hits all of them.",
        "Static: batches in the order in which requests come; each runs until its longest answer is done, rows of "
        "answers that are done are computed until then (Orca, OSDI 2022, section 3.1), prompts share nothing. Prompts "
        "are not padded. The last line has neither: of static batching, only when a request may begin is left.",
        f"Static computes {static / continuous:.2f} times the rows. Where a step's time goes with its rows, as on a "
        "processor without matrix instructions, that is about what there is to gain; rows that leave make room for "
        "others only where a step of few rows costs as much as one of many.",
        f"Reading prompts takes {shares['continuous']:.0%} of the time of continuous batching and "
        f"{shares['static']:.0%} of static batching's. A prompt costs the same in either: that part shrinks only by "
        "prefixes that are shared, the rest by the rows of answers that are done already.",
        f"The first token of a prompt of {mix.shared + _BEHIND} tokens comes after {first.cold:.3g} s, after "
        f"{first.warm:.3g} s where its first {mix.shared} are known: {first.cold / first.warm:.1f} times sooner.",
    )


def _first_tokens(model: Model, mix: Mix, rounds: int) -> First:
    """One client at a time, so that nothing waits. Prefixes are shared under the same salt alone."""
    from lockstep.serve import Engine, SamplingParams

    draw, vocabulary = random.Random("first"), model.config.vocab_size
    engine, prefix = Engine(model), _tokens(draw, mix.shared, vocabulary)

    def first(salt: str) -> float:
        prompt = [*prefix, *_tokens(draw, _BEHIND, vocabulary)]
        began = time.perf_counter()
        engine.add_request(prompt, SamplingParams(max_tokens=1), salt=salt)
        while engine.has_work():
            engine.step()
        return time.perf_counter() - began

    first("known")
    cold, warm = zip(*((first(f"new {i}"), first("known")) for i in range(max(3, rounds))), strict=True)
    return First(statistics.median(cold), statistics.median(warm))


def _serve(sides: Collection[_Side]) -> Iterator[float]:
    """One round, step by step; gives the part of the work that is done.

    The next step is that of the side whose requests have got the least of their answers so far. So a busy moment of the
    machine hits every side at the same place of its work.
    """
    while running := [side for side in sides if side.runs()]:
        side = min(running, key=lambda side: side.told)
        side.advance()
        yield side.told / side.whole


class _Side:
    """An engine that serves the work one way. Its clock goes only while it does something."""

    def __init__(self, model: Model, work: Sequence[Asked], mix: Mix, way: Way) -> None:
        from lockstep.serve import Engine

        self._engine = Engine(model, max_running=mix.at_once, prefix_cache=way.prefix_cache)
        self._clock, self._seconds, self._way = _Clock(self._engine), 0.0, way
        size = mix.at_once if way.whole_batches else len(work)
        self._batches = [work[at : at + size] for at in range(0, len(work), size)]
        self.whole = sum(tokens for _, tokens in work)
        """Tokens that are asked for."""
        self._left: dict[int, int] = {}
        """Tokens that a request still waits for, by its id."""
        self._answers: list[float] = []
        self.told = 0
        """Those of them that have come."""

    def runs(self) -> bool:
        return bool(self._batches) or self._engine.has_work()

    def advance(self) -> None:
        """One step; the next batch begins with it where there is no other work."""
        began = time.perf_counter()
        if not self._engine.has_work():
            self._begin(self._batches.pop(0))
        outputs = self._engine.step()
        self._seconds += time.perf_counter() - began
        for output in outputs:
            self._take(output)

    def served(self) -> Served:
        share, reading = 1 - self._clock.inside / self._seconds, self._clock.reading / self._seconds
        rows, answer = self._engine.stats().computed_tokens, statistics.median(self._answers)
        return Served(self._seconds, self.whole / self._seconds, rows, share, reading, answer)

    def _begin(self, batch: Sequence[Asked]) -> None:
        from lockstep.serve import SamplingParams

        longest = max(tokens for _, tokens in batch)
        for prompt, tokens in batch:
            wanted = longest if self._way.keeps_done else tokens
            params = SamplingParams(max_tokens=wanted, temperature=0.0, ignore_eos=True)
            self._left[self._engine.add_request(prompt, params)] = tokens

    def _take(self, output: Output) -> None:
        new = min(len(output.token_ids), self._left[output.request])
        self._left[output.request] -= new
        self.told += new
        if output.finish_reason is not None:
            self._answers.append(self._seconds)


class _Clock:
    """Seconds of an engine's forward passes from now on: all of them, and the part of those with rows of prompts."""

    def __init__(self, engine: Engine) -> None:
        self.inside = self.reading = 0.0
        self._run = engine._runner.run
        engine._runner.run = self._timed  # type: ignore[method-assign]

    def _timed(self, step: Step, rows: list[int]) -> tuple[Tensor, Tensor]:
        began = time.perf_counter()
        found = self._run(step, rows)
        seconds = time.perf_counter() - began
        decoding = sum(chunk.samples and len(chunk.tokens) == 1 for chunk in step.chunks)
        self.inside += seconds
        self.reading += seconds * (1 - decoding / step.tokens)
        return found


def _cell(values: list[float]) -> str:
    spread = Spread.of(values)
    return f"{spread.median:.1f} ({spread.low:.1f} to {spread.high:.1f})"


def _tokens(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(count)]


def _between(draw: random.Random, ends: tuple[int, int]) -> int:
    """A whole number, its logarithm evenly drawn."""
    low, high = ends
    return min(high, int(low * (high / low) ** draw.random()))
