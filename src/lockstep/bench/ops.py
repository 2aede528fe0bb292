"""Every operator, forward and backward, against PyTorch's own, beside what this machine can do."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from lockstep.bench.machine import describe
from lockstep.bench.op_case import QUICK, Case, Sizes
from lockstep.bench.op_cases import cases
from lockstep.bench.report import Report
from lockstep.bench.turns import Spread, ratios, take_turns
from lockstep.errors import LockstepError
from lockstep.ops import operators
from lockstep.ops.peaks import matrix_meter, read_bandwidth

Pair = tuple[float, float]
"""Seconds of a forward and of its backward."""
_LEAST = 2e-3
"""Seconds of one measurement: shorter calls are repeated."""
_IDLE, _SETTLED = 0.01, 0.03
"""Seconds that a side waits for the threads of the one before it, which spin for some milliseconds after their last
call, and from when on it is measured: cores that come out of idleness, and our own threads, which do not spin for a
while after others held their core, are slow at first (calls of 0.1 to 1 ms came out at half their speed)."""
_LONG, _SLOWER = 0.1, 4.0
"""Seconds of a call that no first use explains, and how many times slower a side is that is measured no further."""


@dataclass(frozen=True)
class Line:
    """One operator, one direction. Times in seconds; ratio: PyTorch's time over ours, round by round. theirs: the
    dtype PyTorch is faster in. rate: of ours, FLOP/s or bytes/s, as unit says."""

    operator: str
    part: str
    seconds: float
    torch_seconds: float
    theirs: str
    ratio: Spread
    unit: str
    rate: float
    why: str

    def share(self, peaks: Peaks) -> float:
        """The part of the machine's peak."""
        return self.rate / (peaks.products if self.unit == "GFLOP/s" else peaks.reads).median


@dataclass(frozen=True)
class Peaks:
    """What the machine gave beside the operators: FLOP/s in products, bytes/s read from memory."""

    products: Spread
    reads: Spread


def bench_ops(
    dtype: torch.dtype, rounds: int, quick: bool = False, note: Callable[[str], None] = print, only: str = ""
) -> Report:
    """Measure the cases whose names contain `only`, all by default; LockstepError where no name does."""
    every = cases(QUICK if quick else Sizes())
    chosen = [case for case in every if only in case.name]
    if not chosen:
        names = "; ".join(dict.fromkeys(case.name for case in every))
        raise LockstepError(f"--only {only}: no operator's name contains it. There are: {names}.")
    machine, meter = describe(), matrix_meter(dtype)
    lines: list[Line] = []
    measured = [(meter(), read_bandwidth())]  # anew with every operator: a busy moment must not be the ruler of all
    for case in chosen:
        note(case.name)
        kind = torch.float32 if case.wide == len(case.shapes) else dtype
        lines += measure(case, kind, rounds, 0.0 if quick else _SETTLED)
        measured.append((meter(), read_bandwidth()))
    peaks = Peaks(*map(Spread.of, zip(*measured, strict=True)))
    name = str(dtype).removeprefix("torch.")
    return Report(
        name=f"ops-{name}",
        title=f"Operators in {name}, against PyTorch's own",
        command=f"lockstep bench ops --dtype {name} --rounds {rounds}{f' --only {shlex.quote(only)}' if only else ''}",
        machine=machine,
        columns=("operator", "", "ms", "PyTorch ms", "PyTorch's dtype", "lockstep is", "rate", "of peak"),
        rows=tuple(_row(line, peaks) for line in lines),
        notes=tuple(_notes(lines, peaks)),
        data={
            "dtype": name, "matrix_peak": vars(peaks.products), "read_bandwidth": vars(peaks.reads),
            "lines": [{**vars(line), "ratio": vars(line.ratio), "share": line.share(peaks)} for line in lines],
        },
    )  # fmt: skip


def measure(case: Case, dtype: torch.dtype, rounds: int, settled: float = _SETTLED) -> list[Line]:
    """The lines of a case: PyTorch also runs in float32, and the dtype it is faster in counts. settled: seconds that a
    side has the machine for itself before it is measured."""
    kinds = [dtype] if dtype == torch.float32 else [dtype, torch.float32]
    theirs = {str(kind): _side(case, kind, ours=False) for kind in kinds}
    sides = {"": _side(case, dtype, ours=True)} | _may_be_faster(theirs)
    times = take_turns({name: alone(side, settled) for name, side in sides.items()}, rounds, warmup=2)
    return [_line(case, part, take, dtype, times) for part, take in _parts(case)]


def alone(side: Callable[[], Pair], settled: float) -> Callable[[], Pair]:
    """A side that is measured as it runs when no other does: by its first call that begins so many seconds after the
    other side's end, or that takes as long itself."""

    def call() -> Pair:
        start = time.perf_counter()
        time.sleep(min(_IDLE, settled))
        while True:
            began = time.perf_counter()
            pair = side()
            if began - start >= settled or time.perf_counter() - began >= settled:
                return pair

    return call


def _may_be_faster(sides: dict[str, Callable[[], Pair]]) -> dict[str, Callable[[], Pair]]:
    """Without those that a call shows to be several times slower than another: without instructions for it, a product
    in bfloat16 takes a hundred times as long as one in float32."""

    def once(side: Callable[[], Pair]) -> float:
        first = sum(side())
        return first if first > _LONG else min(first, sum(side()), sum(side()))

    taken = {name: once(side) for name, side in sides.items()}
    return {name: side for name, side in sides.items() if taken[name] <= _SLOWER * min(taken.values())}


def _parts(case: Case) -> list[tuple[str, Callable[[Pair], float]]]:
    """The directions of a case, each with what it takes from a pair of (forward, backward) seconds."""
    if case.whole:
        return [("both", sum)]
    forward = ("forward", itemgetter(0))
    return [forward, ("backward", itemgetter(1))] if case.gradient else [forward]


def _line(
    case: Case, part: str, take: Callable[[Pair], float], dtype: torch.dtype, times: dict[str, list[Pair]]
) -> Line:
    taken = {side: [take(pair) for pair in pairs] for side, pairs in times.items()}
    mine = taken.pop("")
    best = min(taken, key=lambda side: Spread.of(taken[side]).median)
    seconds = Spread.of(mine).median
    return Line(
        operator=case.name, part=part, seconds=seconds, torch_seconds=Spread.of(taken[best]).median,
        theirs=best.removeprefix("torch."), ratio=ratios(mine, taken[best]),
        unit="GFLOP/s" if case.flops else "GB/s", rate=_work(case, dtype, part) / seconds, why=case.why,
    )  # fmt: skip


def _work(case: Case, dtype: torch.dtype, part: str) -> float:
    """FLOPs, or bytes: inputs read and the result written once; the backward reads inputs and the result's gradient
    and writes a gradient for each input; or what the case says is moved."""
    if case.flops:
        return case.flops * {"forward": 1.0, "backward": 2.0, "both": 3.0}[part]
    if case.moved:
        return float(case.moved[part == "backward"] * dtype.itemsize)
    sizes = [
        torch.Size(shape).numel() * (4 if i < case.wide else dtype.itemsize) for i, shape in enumerate(case.shapes)
    ]
    return float(sum(sizes) * (2 if part == "backward" else 1) + sizes[0])


def _side(case: Case, dtype: torch.dtype, ours: bool) -> Callable[[], Pair]:
    """A call that gives the seconds of one forward and of one backward."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in case.shapes]
    inputs[case.wide :] = [x.to(dtype) for x in inputs[case.wide :]]
    ops = operators("bitwise")
    given: Sequence[object] = inputs
    if ours and case.prepare is not None:
        given = case.prepare(ops, inputs)
    first = (ops,) if ours else ()
    run = case.ours if ours else case.theirs
    if not case.gradient:
        return lambda: (_repeated(lambda: run(*first, *given)), 0.0)
    for x in inputs:
        x.requires_grad_()
    return lambda: _both(lambda: run(*first, *given), inputs)


def _repeated(call: Callable[[], object]) -> float:
    """Seconds of a call without gradient, repeated until the clock is fine enough."""
    with torch.no_grad():
        count, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < _LEAST or count == 0:
            call()
            count += 1
    return passed / count


def _both(call: Callable[[], object], inputs: Sequence[Tensor]) -> Pair:
    forward, backward, count = 0.0, 0.0, 0
    while forward + backward < _LEAST or count == 0:
        start = time.perf_counter()
        y = call()
        middle = time.perf_counter()
        results = [y] if isinstance(y, Tensor) else list(y)  # type: ignore[call-overload]
        torch.autograd.backward(results, [torch.ones_like(part) for part in results])
        end = time.perf_counter()
        forward, backward, count = forward + middle - start, backward + end - middle, count + 1
        for x in inputs:
            x.grad = None
    return forward / count, backward / count


def _row(line: Line, peaks: Peaks) -> tuple[str, ...]:
    ratio = line.ratio
    return (
        line.operator,
        line.part,
        f"{1e3 * line.seconds:.3g}",
        f"{1e3 * line.torch_seconds:.3g}",
        line.theirs,
        f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})",
        f"{line.rate / 1e9:.1f} {line.unit}",
        f"{100 * line.share(peaks):.0f} %",
    )


def _notes(lines: Sequence[Line], peaks: Peaks) -> list[str]:
    products, reads = peaks.products, peaks.reads
    notes = [
        f"Peaks, measured with every operator: {products.median / 1e9:.0f} GFLOP/s in products "
        f"({products.low / 1e9:.0f} to {products.high / 1e9:.0f}), {reads.median / 1e9:.1f} GB/s read from memory "
        f"({reads.low / 1e9:.1f} to {reads.high / 1e9:.1f}; inputs that stay in a cache go beyond it). PyTorch runs in "
        "this dtype and in float32; the one it is faster in counts."
    ]
    for line in lines:
        if line.ratio.median < 1.0:
            why = f": {line.why}" if line.why else ""
            notes.append(f"{line.operator}, {line.part}, is slower than PyTorch's, {line.ratio.median:.2f}x{why}.")
    return notes
