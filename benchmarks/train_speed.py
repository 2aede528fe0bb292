"""Training speed and memory: Lockstep against `transformers`, eager and compiled, side by side.

    python benchmarks/train_speed.py [--shape 28m|smollm2|tiny] [--vs hf-eager,hf-compile] [--rounds 5] [--json FILE]

Every side is a process of its own with the same initial weights (seed 0), the same tokens and AdamW in its fused or
own form. They take turns, a step each, so that a busy moment of the machine hits all of them; the first two steps of
each (compilation, caches) are not measured. All sides compute in bfloat16: ours with float32 masters and moments,
`transformers` in pure bfloat16 with SDPA attention and fused AdamW. Losses are printed, and must agree to 1e-2 after
the first step, so that the same work is compared. `hf-eager-float32` and `hf-compile-float32` are `transformers` in
float32, its best setting on processors without bf16 instructions. MFU is model FLOPs (6 N with the head, plus causal
attention) over `lockstep.ops.peaks.matrix_peak`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.config import ModelConfig

SEQUENCES, LENGTH, LR = 4, 512, 1e-4
SHAPES = {
    "tiny": ModelConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        max_positions=LENGTH, tie_embeddings=True,
    ),
    "28m": ModelConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_layers=8, num_heads=8, num_kv_heads=4,
        head_dim=64, max_positions=LENGTH, tie_embeddings=True,
    ),
    "smollm2": ModelConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, max_positions=LENGTH, rope_theta=100000.0, tie_embeddings=True,
    ),
}  # fmt: skip


@dataclass
class Side:
    """One peer: its process, and what it measured."""

    name: str
    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first_step_s: float = 0.0
    peak_gib: float = 0.0

    def step(self) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        answer: dict[str, float] = json.loads(self.process.stdout.readline())
        self.losses.append(answer["loss"])
        self.peak_gib = answer["peak_gib"]
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="28m")
    parser.add_argument("--vs", default="hf-eager,hf-compile")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        return serve_steps(SIDES[arguments.side](SHAPES[arguments.shape]))
    names = ["lockstep", *filter(None, arguments.vs.split(","))]
    unknown = set(names) - set(SIDES)
    if unknown:
        parser.error(f"--vs names {min(unknown)!r}; known are {', '.join(SIDES)}")
    report(measure(names, arguments.shape, arguments.rounds), arguments.shape, arguments.json)


def measure(names: list[str], shape: str, rounds: int) -> list[Side]:
    sides = [Side(name, start(name, shape)) for name in names]
    for side in sides:
        side.first_step_s = side.step()["seconds"]
        side.step()
    for _ in range(rounds):
        for side in sides:
            side.seconds.append(side.step()["seconds"])
        print("  ".join(f"{side.name} {side.seconds[-1]:.2f} s" for side in sides), file=sys.stderr, flush=True)
    for side in sides:
        side.process.communicate()
    return sides


def start(name: str, shape: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--shape", shape, "--side", name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve_steps(step: Callable[[], float]) -> None:
    """A side's process: a step for every line on standard input."""
    for _ in sys.stdin:
        began = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"seconds": seconds, "loss": loss, "peak_gib": peak}), flush=True)


def tokens(config: ModelConfig) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (SEQUENCES, LENGTH), generator=generator)


def lockstep_side(config: ModelConfig, dtype: torch.dtype) -> Callable[[], float]:
    from lockstep.model.init import random_decoder
    from lockstep.ops import Packed, operators

    ops, decoder, ids = operators("bitwise"), random_decoder(config, 0), tokens(config)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=LR, fused=True)
    batch = Packed.of([LENGTH] * SEQUENCES)
    targets = torch.cat([ids[:, 1:], torch.full((SEQUENCES, 1), -1)], dim=1).flatten()
    weights = torch.full((SEQUENCES * LENGTH,), 1.0 / (SEQUENCES * (LENGTH - 1)))

    def step() -> float:
        hidden = decoder(ops, ids.flatten(), batch, dtype=dtype)
        loss, _ = ops.linear_cross_entropy(hidden, decoder.head_weight, targets, weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def hf_side(config: ModelConfig, dtype: torch.dtype, compiled: bool) -> Callable[[], float]:
    import tempfile

    from transformers import AutoModelForCausalLM

    from lockstep.model import Model
    from lockstep.model.init import random_decoder
    from lockstep.ops import operators

    with tempfile.TemporaryDirectory() as scratch:
        Model(random_decoder(config, 0), None, operators("fast"), torch.float32).save(Path(scratch) / "model")
        model: Any = AutoModelForCausalLM.from_pretrained(Path(scratch) / "model", dtype=dtype)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    ids, run = tokens(config), torch.compile(model) if compiled else model

    def step() -> float:
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


SIDES: dict[str, Callable[[ModelConfig], Callable[[], float]]] = {
    "lockstep": lambda config: lockstep_side(config, torch.bfloat16),
    "lockstep-float32": lambda config: lockstep_side(config, torch.float32),
    "hf-eager": lambda config: hf_side(config, torch.bfloat16, compiled=False),
    "hf-compile": lambda config: hf_side(config, torch.bfloat16, compiled=True),
    "hf-eager-float32": lambda config: hf_side(config, torch.float32, compiled=False),
    "hf-compile-float32": lambda config: hf_side(config, torch.float32, compiled=True),
}


def report(sides: list[Side], shape: str, file: Path | None) -> None:
    from lockstep.model.init import random_decoder
    from lockstep.ops.peaks import matrix_peak

    config, peak = SHAPES[shape], matrix_peak(torch.bfloat16)
    count = sum(p.numel() for p in random_decoder(config, 0).parameters())
    attention = 6 * config.num_layers * config.num_heads * config.head_dim * LENGTH
    flops = (6 * count + attention) * SEQUENCES * LENGTH
    rows = [row(side, flops / peak) for side in sides]
    for one in rows:
        print(
            f"{one['side']:18s} {one['tokens_per_s']:8.0f} tokens/s  MFU {100 * one['mfu']:5.1f} %  "
            f"spread {100 * one['spread']:3.0f} %  first step {one['first_step_s']:6.1f} s  "
            f"peak {one['peak_gib']:.2f} GiB  ours is {rows[0]['tokens_per_s'] / one['tokens_per_s']:.2f}x  "
            f"losses {one['losses'][0]:.4f} .. {one['losses'][-1]:.4f}"
        )
    print(f"{shape}: {count / 1e6:.1f} M parameters, {SEQUENCES} x {LENGTH} tokens, peak {peak / 1e9:.0f} GFLOP/s")
    apart = max(abs(side.losses[0] - sides[0].losses[0]) for side in sides)
    if apart > 1e-2:
        raise SystemExit(f"the first losses differ by {apart:.4f}: the sides do not do the same work")
    if file:
        what = {"shape": config.model_dump(mode="json"), "parameters": count, "matrix_peak": peak}
        file.write_text(json.dumps({**what, "torch": torch.__version__, "sides": rows}, indent=2) + "\n")


def row(side: Side, ideal_s: float) -> dict[str, Any]:
    """What one side measured; ideal_s: seconds of a step at the matrix peak."""
    median = statistics.median(side.seconds)
    return {
        "side": side.name, "tokens_per_s": SEQUENCES * LENGTH / median, "mfu": ideal_s / median,
        "spread": (max(side.seconds) - min(side.seconds)) / median, "first_step_s": side.first_step_s,
        "peak_gib": side.peak_gib, "losses": side.losses,
    }  # fmt: skip


if __name__ == "__main__":
    main()
