"""Training speed and memory, side by side with peers: the same weights, tokens and optimizer, a step each in turn."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from lockstep.bench.machine import Machine, describe
from lockstep.bench.report import Report
from lockstep.bench.shapes import shape
from lockstep.bench.step_client import Side, interpreter
from lockstep.bench.train_own import OWN
from lockstep.bench.turns import Spread, ratios, take_turns
from lockstep.config import ModelConfig
from lockstep.errors import LockstepError
from lockstep.model import Model
from lockstep.model.init import random_decoder
from lockstep.ops import Packed, operators
from lockstep.ops.peaks import matrix_meter
from lockstep.train.data import Batch
from lockstep.train.flops import step_flops

SAME = 1e-2
"""How far first losses may be apart: bfloat16 rounding of the whole model moves them by a tenth of that."""
_RATE = 1e-4
_PEAK = "matrix peak"
_PEERS = {
    "hf-eager": ("transformers", "bfloat16", "eager"),
    "hf-compile": ("transformers", "bfloat16", "compile"),
    "hf-eager-float32": ("transformers", "float32", "eager"),
    "hf-compile-float32": ("transformers", "float32", "compile"),
    "mindspore": ("mindspore", "float32", "graph"),
}
"""Environment, dtype, mode. float32 is the better setting for PyTorch on processors without bf16 instructions, and
the only one of MindSpore on CPUs."""


@dataclass(frozen=True)
class Found:
    """What a side measured. first_s: its first step, compilation included."""

    name: str
    seconds: list[float]
    first_s: float
    peak_bytes: int
    losses: list[float]


def bench_train(
    model: str,
    vs: Sequence[str],
    rounds: int,
    peers: Path,
    size: tuple[int, int] = (4, 512),
    note: Callable[[str], None] = print,
) -> Report:
    """Measure `lockstep` and these sides on a shape with size = (sequences, tokens of each).

    peers: where `benchmarks/peers.sh` put environments; a peer that has none there runs in this one.
    """
    config, names = shape(model), ["lockstep", *(name for name in vs if name != "lockstep")]
    unknown = [name for name in names if name not in OWN and name not in _PEERS]
    if unknown:
        raise LockstepError(f"--vs names {unknown[0]!r}: known are {', '.join([*OWN, *_PEERS])}.")
    commands = {name: _command(name, peers) for name in names}  # a missing peer is told of before anything runs
    machine = describe("transformers")
    with tempfile.TemporaryDirectory() as scratch:
        write_inputs(config, size, Path(scratch))
        found, peaks = _measure(commands, rounds, Path(scratch), note)
    check_same_work(found)
    return _report(model, config, size, found, peaks, machine, list(vs))


def check_same_work(sides: Sequence[Found]) -> None:
    """LockstepError unless the losses of the first step, before any update, agree to SAME."""
    for side in sides[1:]:
        apart = abs(side.losses[0] - sides[0].losses[0])
        if not apart <= SAME:
            raise LockstepError(
                f"the first losses of {sides[0].name} and {side.name} are {apart:.4f} apart ({sides[0].losses[0]:.4f}, "
                f"{side.losses[0]:.4f}), more than {SAME}: the sides do not do the same work, so their times cannot be "
                "compared."
            )


def write_inputs(config: ModelConfig, size: tuple[int, int], directory: Path) -> None:
    """Random weights (seed 0), as float32 in a Hugging Face directory, and tokens."""
    Model(random_decoder(config, 0), None, operators("fast"), torch.float32).save(directory / "model")
    generator = torch.Generator().manual_seed(1)
    np.save(directory / "tokens.npy", torch.randint(config.vocab_size, size, generator=generator).numpy())


def _command(name: str, peers: Path) -> Callable[[Path], list[str]]:
    """The command line of a side, given the directory of its inputs."""
    if name in OWN:
        start = [sys.executable, "-m", "lockstep.bench.train_own"]
        return lambda at: [*start, str(at / "model"), str(at / "tokens.npy"), name, str(_RATE)]
    package, dtype, mode = _PEERS[name]
    script = Path(__file__).parent / "peers" / f"{package}_train.py"
    start = [interpreter(package, peers), str(script)]
    return lambda at: [*start, str(at / "model"), str(at / "tokens.npy"), dtype, mode, str(_RATE)]


def _measure(
    commands: dict[str, Callable[[Path], list[str]]], rounds: int, inputs: Path, note: Callable[[str], None]
) -> tuple[list[Found], list[float]]:
    """What the sides measured, and this machine's matrix peak in every round, which takes its turn with them."""
    sides = [Side.started(name, command(inputs)) for name, command in commands.items()]
    try:
        first = {}
        for side in sides:
            first[side.name] = side.step()
            note(f"{side.name}: first step {first[side.name]:.1f} s, loss {side.losses[0]:.4f}")
        turns = {_PEAK: matrix_meter(torch.bfloat16), **{side.name: side.step for side in sides}}
        found = take_turns(turns, rounds, progress=lambda i, now: note(_round(i, now)))
        return [Found(s.name, found[s.name], first[s.name], s.peak_bytes, s.losses) for s in sides], found[_PEAK]
    finally:
        for side in sides:
            side.end()


def _round(number: int, found: dict[str, float]) -> str:
    told = (f"{name} {v / 1e9:.0f} GFLOP/s" if name == _PEAK else f"{name} {v:.2f} s" for name, v in found.items())
    return f"round {number + 1}: " + "  ".join(told)


def _report(
    model: str,
    config: ModelConfig,
    size: tuple[int, int],
    found: Sequence[Found],
    peaks: Sequence[float],
    machine: Machine,
    vs: list[str],
) -> Report:
    sequences, length = size
    ours = found[0]
    decoder = random_decoder(config, 0)
    tokens = torch.zeros(sequences * length, dtype=torch.int64)
    flops = step_flops(decoder, [Batch(tokens, tokens, Packed.of([length] * sequences))])
    count = sum(p.numel() for p in decoder.parameters())
    row = partial(_row, ours=ours, tokens=sequences * length, ideal=[flops / peak for peak in peaks])
    return Report(
        name=f"train-{model}",
        title=f"Training {model}: {count / 1e6:.1f} M parameters, {sequences} x {length} tokens",
        command=f"lockstep bench train --model {model} --vs {','.join(vs)} --rounds {len(ours.seconds)}",
        machine=machine,
        columns=("side", "tokens/s", "spread", "MFU", "lockstep is", "first step", "peak memory", "losses"),
        rows=tuple(row(side) for side in found),
        notes=tuple(_notes(found, flops, peaks)),
        data={
            "shape": config.model_dump(mode="json"), "parameters": count, "step_flops": flops,
            "matrix_peaks": list(peaks),
            "sides": [vars(side) for side in found],
        },
    )  # fmt: skip


def _row(side: Found, ours: Found, tokens: int, ideal: Sequence[float]) -> tuple[str, ...]:
    """ideal: seconds of each round's step at the peak of that round."""
    spread, ratio = Spread.of(side.seconds), ratios(ours.seconds, side.seconds)
    return (
        side.name,
        f"{tokens / spread.median:,.0f}",
        f"{100 * spread.width:.0f} %",
        f"{100 * ratios(side.seconds, ideal).median:.0f} %",
        "" if side is ours else f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})",
        f"{side.first_s:.1f} s",
        f"{side.peak_bytes / 2**30:.2f} GiB",
        f"{side.losses[0]:.4f} .. {side.losses[-1]:.4f}",
    )


def _notes(found: Sequence[Found], flops: float, peaks: Sequence[float]) -> list[str]:
    ours, peak = found[0], Spread.of(peaks)
    notes = [
        f"MFU: {flops / 1e9:,.1f} GFLOP a step (6 N with the head, plus causal attention) over this machine's matrix "
        f"peak, measured in every round ({peak.median / 1e9:.0f} GFLOP/s, {peak.low / 1e9:.0f} to "
        f"{peak.high / 1e9:.0f}); the median of rounds. Spread: (slowest - fastest step) / median. `lockstep` is: per "
        "round, median (least - largest)."
    ]
    for side in found[1:]:
        memory = side.peak_bytes / ours.peak_bytes
        if side.name in _PEERS:
            notes.append(
                f"`lockstep` keeps float32 masters and moments and takes {1 / memory:.2f} of the peak memory of "
                f"`{side.name}`."
            )
    return notes + _fast(found) + _pure(found)


def _fast(found: Sequence[Found]) -> list[str]:
    """What the contract costs: each side under `fast` beside the one that is the same under `bitwise`, where it ran."""
    by_name = {side.name: side for side in found}
    pairs = [("lockstep", "lockstep-fast"), ("lockstep-float32", "lockstep-fast-float32")]
    notes = []
    for bitwise, fast in pairs:
        if bitwise in by_name and fast in by_name:
            more = ratios(by_name[fast].seconds, by_name[bitwise].seconds).median - 1.0
            notes.append(f"A step of `{bitwise}` is {more:+.0%} against one of `{fast}` (target: at most +5 %).")
    return notes


def _pure(found: Sequence[Found]) -> list[str]:
    """Peak memory at the peer's own precision, where both ran."""
    by_name = {side.name: side for side in found}
    pure = by_name.get("lockstep-pure-bf16")
    peers = [by_name[name] for name in ("hf-eager", "hf-compile") if name in by_name]
    if pure is None:
        return []
    return [
        f"With weights and moments in bfloat16 on both sides ours takes {pure.peak_bytes / peer.peak_bytes:.2f} of the "
        f"peak memory of `{peer.name}` (target: at most 0.6)."
        for peer in peers
    ]
