"""Every operator, forward and backward: the contract kernels against plain PyTorch, side by side.

    python benchmarks/op_speed.py [--dtype bfloat16|float32] [--rounds 7] [--json FILE]

Shapes are those of SmolLM2-135M with 4 x 512 tokens (attention: SDPA on the padded batch for PyTorch, its best form).
The sides alternate, so that a busy moment of the machine hits both; medians. `rate` is GFLOP/s for products and
attention, GB/s (bytes read and written once) for the others. PyTorch also runs in float32 where that is faster for it
(on processors without bf16 instructions): the better of both counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.ops import Operators, Packed, operators

T, D, FFN, HEADS, KV, DIM, LENGTH = 2048, 576, 1536, 9, 3, 64, 512
BATCH = Packed.of([LENGTH] * (T // LENGTH))


@dataclass(frozen=True)
class Case:
    """An operator on inputs of these shapes. work: FLOPs of the forward (None: count bytes); the backward has 2x."""

    shapes: tuple[tuple[int, ...], ...]
    run: Callable[..., Tensor]
    plain: Callable[..., Tensor] | None = None
    work: float | None = None


@dataclass(frozen=True)
class Line:
    operator: str
    part: str
    ours_ms: float
    torch_ms: float
    rate: float


def sdpa(_: Operators, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    split = [x.view(T // LENGTH, LENGTH, x.shape[1], DIM).transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*split, is_causal=True, enable_gqa=True).transpose(1, 2)


def sdpa_window(_: Operators, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(LENGTH)
    mask = (at[:, None] >= at) & (at[:, None] - at < 128)
    split = [x.view(T // LENGTH, LENGTH, x.shape[1], DIM).transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*split, attn_mask=mask, enable_gqa=True).transpose(1, 2)


TABLE = torch.rand(LENGTH, DIM // 2, 2)
TARGETS = torch.arange(512) * 97 % 8192
QKV = ((T, HEADS, DIM), (T, KV, DIM), (T, KV, DIM))
PAIRS = T * LENGTH / 2  # causal (query, key) pairs of a head
CASES = {
    "linear 576 -> 1536": Case(((T, D), (FFN, D)), lambda o, x, w: o.linear(x, w), work=2.0 * T * D * FFN),
    "linear 1536 -> 576": Case(((T, FFN), (D, FFN)), lambda o, x, w: o.linear(x, w), work=2.0 * T * D * FFN),
    "attention": Case(QKV, lambda o, *x: o.attention(*x, BATCH, 0.125), sdpa, 4.0 * PAIRS * HEADS * DIM),
    "attention, window 128": Case(QKV, lambda o, *x: o.attention(*x, BATCH, 0.125, 128), sdpa_window),
    "rms_norm": Case(((T, D), (D,)), lambda o, x, w: o.rms_norm(x, w, 1e-5), lambda _, x, w: F.rms_norm(x, (D,), w)),
    "rope": Case(((T, HEADS, DIM),), lambda o, x: o.rope(x, BATCH.positions, TABLE)),
    "swiglu": Case(((T, FFN), (T, FFN)), lambda o, g, u: o.gated(g, u, "silu"), lambda _, g, u: F.silu(g) * u),
    "linear cross-entropy": Case(
        ((512, D), (8192, D)),
        lambda o, x, w: o.linear_cross_entropy(x, w, TARGETS, torch.full((512,), 1 / 512))[0],
        lambda _, x, w: F.cross_entropy((x @ w.T).float(), TARGETS),
        2.0 * 512 * D * 8192,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    dtype, lines = getattr(torch, arguments.dtype), []
    print(f"{arguments.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, case in CASES.items():
        for line in measure(name, case, dtype, arguments.rounds):
            unit = "GFLOP/s" if case.work else "GB/s"
            ratio = line.torch_ms / line.ours_ms
            print(
                f"{line.operator:22s} {line.part:8s} ours {line.ours_ms:8.2f} ms  PyTorch {line.torch_ms:8.2f} ms  "
                f"{ratio:5.2f}x  {line.rate:6.1f} {unit}",
                flush=True,
            )
            lines.append(line)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n")


def measure(name: str, case: Case, dtype: torch.dtype, rounds: int) -> list[Line]:
    theirs = [dtype] if dtype == torch.float32 else [torch.float32, dtype]
    sides = [timed(operators("bitwise"), case.run, case, dtype)]
    sides += [timed(operators("fast"), case.plain or case.run, case, kind) for kind in theirs]
    times: list[list[tuple[float, float]]] = [[] for _ in sides]
    for i in range(rounds + 1):
        for side, found in zip(sides, times, strict=True):
            pair = side()
            if i:
                found.append(pair)
    lines = []
    for part, index, factor in (("forward", 0, 1.0), ("backward", 1, 2.0)):
        ours, *others = (statistics.median(pair[index] for pair in found) for found in times)
        elements = sum(torch.Size(s).numel() for s in case.shapes) + torch.Size(case.shapes[0]).numel()
        work = case.work or elements * dtype.itemsize
        lines.append(Line(name, part, 1e3 * ours, 1e3 * min(others), factor * work / ours / 1e9))
    return lines


def timed(
    ops: Operators, run: Callable[..., Tensor], case: Case, dtype: torch.dtype
) -> Callable[[], tuple[float, float]]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in case.shapes]

    def once() -> tuple[float, float]:
        start = time.perf_counter()
        y = run(ops, *inputs)
        middle = time.perf_counter()
        y.backward(torch.ones_like(y))
        end = time.perf_counter()
        for x in inputs:
            x.grad = None
        return middle - start, end - middle

    return once


if __name__ == "__main__":
    main()
