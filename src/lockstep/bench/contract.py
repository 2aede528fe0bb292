"""What the bit contract costs: training steps and decoding under `bitwise` and under `fast`, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from lockstep.bench.decoding import decoding_step
from lockstep.bench.machine import describe
from lockstep.bench.report import Report
from lockstep.bench.shapes import shape
from lockstep.bench.train_own import OWN, batch_of, training_step
from lockstep.bench.turns import Spread, ratios, take_turns
from lockstep.config import ModelConfig
from lockstep.model import Model
from lockstep.model.init import random_decoder
from lockstep.ops import operators

_TRAINING = {
    ("bfloat16", "bitwise"): "lockstep", ("bfloat16", "fast"): "lockstep-fast",
    ("float32", "bitwise"): "lockstep-float32", ("float32", "fast"): "lockstep-fast-float32",
}  # fmt: skip
_PROMPT = 32
Side = Callable[[], float]


def bench_contract(
    model: str,
    dtype: str,
    size: tuple[int, int],
    clients: Sequence[int],
    tokens: int,
    rounds: int,
    note: Callable[[str], None] = print,
) -> Report:
    """Measure on a shape with random weights: a training step of size = (sequences, tokens of each), and decoding of
    so many tokens by some numbers of clients. Operators run one by one (O0) on both sides: `fast` is not compiled."""
    config, machine = shape(model), describe()
    sides: dict[str, dict[str, Side]] = {f"training step, {size[0]} x {size[1]} tokens": _training(config, dtype, size)}
    for count in clients:
        sides[f"a token of {count} client{'s' if count > 1 else ''}"] = _decoding(config, dtype, count, tokens)
    turns = {f"{what}: {mode}": side for what, modes in sides.items() for mode, side in modes.items()}
    found = take_turns(turns, rounds, progress=lambda i, _: note(f"round {i + 1} of {rounds}"))
    lines = {what: (found[f"{what}: bitwise"], found[f"{what}: fast"]) for what in sides}
    return Report(
        name=f"contract-{dtype}",
        title=f"What the bit contract costs in {dtype}",
        command=f"lockstep bench contract --model {model} --dtype {dtype} --batch {size[0]}x{size[1]} "
        f"--clients {','.join(map(str, clients))} --tokens {tokens} --rounds {rounds}",
        machine=machine,
        columns=("", "bitwise, ms", "fast, ms", "bitwise takes"),
        rows=tuple(_row(what, *line) for what, line in lines.items()),
        notes=(
            "`fast` is plain PyTorch in the same dtype (target: `bitwise` takes at most 5 % more). In brackets: least "
            "and largest of the rounds.",
        ),
        data={what: {"bitwise": ours, "fast": theirs} for what, (ours, theirs) in lines.items()},
    )


def _training(config: ModelConfig, dtype: str, size: tuple[int, int]) -> dict[str, Side]:
    tokens = torch.randint(config.vocab_size, size, generator=torch.Generator().manual_seed(1))

    def step(mode: str) -> Side:
        run = training_step(random_decoder(config, 0).train(), OWN[_TRAINING[dtype, mode]], batch_of(tokens), 1e-4)
        return partial(_timed, run)

    return {mode: step(mode) for mode in ("bitwise", "fast")}


def _timed(run: Side) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _decoding(config: ModelConfig, dtype: str, clients: int, tokens: int) -> dict[str, Side]:
    from lockstep.serve import Engine, SamplingParams

    params = SamplingParams(max_tokens=tokens + 1, temperature=0.0, ignore_eos=True)
    prompts = [[(7 + 31 * c + 13 * i) % config.vocab_size for i in range(_PROMPT)] for c in range(clients)]

    def side(mode: str) -> Side:
        kind = getattr(torch, dtype)
        decoder = random_decoder(config, 0).to(kind).requires_grad_(False)
        model = Model(decoder, None, operators(mode), kind)  # type: ignore[arg-type]
        rows = _PROMPT * clients  # all prompts in one step, so that all clients decode from the same step on
        engine = Engine(model, prefix_cache=False, max_batch_tokens=rows, max_running=clients, level="O0")
        return partial(decoding_step, engine, prompts, params)

    return {mode: side(mode) for mode in ("bitwise", "fast")}


def _row(what: str, ours: Sequence[float], theirs: Sequence[float]) -> tuple[str, ...]:
    more = ratios(theirs, ours)
    return (
        what,
        f"{1e3 * Spread.of(ours).median:,.1f}",
        f"{1e3 * Spread.of(theirs).median:,.1f}",
        f"{more.median - 1:+.0%} ({more.low - 1:+.0%} to {more.high - 1:+.0%})",
    )
