"""Tokens per second of the engine while it decodes, and the share of the memory bandwidth that makes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lockstep.bench.decoding import decoding_step
from lockstep.bench.machine import describe
from lockstep.bench.report import Report
from lockstep.bench.shapes import shape
from lockstep.bench.turns import Spread, take_turns
from lockstep.config.serve import BATCH_TOKENS
from lockstep.model import Model
from lockstep.model.init import random_decoder
from lockstep.ops import operators
from lockstep.ops.peaks import read_bandwidth
from lockstep.serve import Engine, SamplingParams
from lockstep.train.flops import matrix_weights

_PROMPT = 32
_BANDWIDTH = "read bandwidth"


def bench_decode(
    model: str, clients: Sequence[int], tokens: int, rounds: int, note: Callable[[str], None] = print
) -> Report:
    """Measure some numbers of clients at once on a shape with random weights in bfloat16, greedily.

    Every client has a prompt of its own, whose prefill is not counted: time runs from the first token of all.
    """
    machine = describe()
    decoder = random_decoder(shape(model), 0).to(torch.bfloat16).requires_grad_(False)
    # All prompts in one step, so that all clients decode from the same step on.
    rows = max(BATCH_TOKENS, _PROMPT * max(clients))
    given = Model(decoder, None, operators("bitwise"), torch.bfloat16)
    engine = Engine(given, prefix_cache=False, max_batch_tokens=rows, max_running=max(clients))
    sides = {str(count): _side(engine, count, tokens) for count in clients}
    turns = {_BANDWIDTH: read_bandwidth, **sides}
    steps = take_turns(turns, rounds, progress=lambda i, found: note(f"round {i + 1} of {rounds}"))
    note("the time within operators")
    shares = {
        count: statistics.median(_overhead(engine, sides[str(count)], tokens) for _ in range(rounds))
        for count in clients
    }
    weights = float(2 * matrix_weights(decoder))
    bandwidths = steps.pop(_BANDWIDTH)
    lines = [_line(count, steps[str(count)], weights, bandwidths, shares[count]) for count in clients]
    bandwidth = Spread.of(bandwidths)
    return Report(
        name=f"decode-{model}",
        title=f"Decoding {model} in bfloat16",
        command=f"lockstep bench decode --model {model} --clients {','.join(map(str, clients))} --rounds {rounds}",
        machine=machine,
        columns=("clients", "tokens/s", "least - largest", "ms a step", "weights read", "of the bandwidth", "overhead"),
        rows=tuple(_row(line) for line in lines),
        notes=(
            f"A step reads all {weights / 1e6:,.0f} MB of weights once, whatever the number of clients; read "
            f"bandwidth, measured in every round: {bandwidth.median / 1e9:.1f} GB/s ({bandwidth.low / 1e9:.1f} to "
            f"{bandwidth.high / 1e9:.1f}). {tokens} tokens a client after a prompt of {_PROMPT}.",
            "Overhead: the part of a step outside operators (scheduling, binding, calling, sampling), from steps of "
            "their own in which every operator is timed (target: at most 5 %).",
        ),
        data={"weight_bytes": weights, "read_bandwidths": bandwidths, "tokens": tokens, "lines": lines},
    )


def _side(engine: Engine, clients: int, tokens: int) -> Callable[[], float]:
    """A call that gives the mean seconds of a step in which every client gets one token."""
    vocabulary = engine.model.config.vocab_size
    params = SamplingParams(max_tokens=tokens + 1, temperature=0.0, ignore_eos=True)
    prompts = [[(7 + 31 * c + 13 * i) % vocabulary for i in range(_PROMPT)] for c in range(clients)]

    return partial(decoding_step, engine, prompts, params)


def _overhead(engine: Engine, once: Callable[[], float], steps: int) -> float:
    """The share of a decoding step's time that is spent outside the operators of its program and the head."""
    runner: Any = engine._runner
    program, head, within = runner._forward.program, runner._head, list[float]()

    def timed_head(*arguments: Any) -> Any:
        begun = time.perf_counter()
        logits = head(*arguments)
        within[-1] += time.perf_counter() - begun
        return logits

    program.run = lambda *bound: within.append(sum(program.profile(*bound)))
    runner._head = timed_head
    try:
        step = once()
    finally:
        del program.run, runner._head
    return 1.0 - statistics.mean(within[-steps:]) / step


def _line(
    clients: int, seconds: Sequence[float], weights: float, bandwidths: Sequence[float], overhead: float
) -> dict[str, Any]:
    step = Spread.of(seconds)
    share = statistics.median(weights / s / bandwidth for s, bandwidth in zip(seconds, bandwidths, strict=True))
    return {
        "clients": clients, "seconds": list(seconds), "tokens_per_s": clients / step.median,
        "low": clients / step.high, "high": clients / step.low, "step_s": step.median,
        "bytes_per_s": weights / step.median, "share": share,
        "overhead": overhead,
    }  # fmt: skip


def _row(line: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{line['clients']}",
        f"{line['tokens_per_s']:.1f}",
        f"{line['low']:.1f} - {line['high']:.1f}",
        f"{1e3 * line['step_s']:.1f}",
        f"{line['bytes_per_s'] / 1e9:.1f} GB/s",
        f"{100 * line['share']:.0f} %",
        f"{100 * line['overhead']:.1f} %",
    )
