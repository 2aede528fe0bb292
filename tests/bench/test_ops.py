"""The operator bench: both sides of every case compute the same, and the report tells what it must."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from inspect import isfunction

import pytest
import torch

from lockstep.bench.op_case import QUICK, Sizes
from lockstep.bench.op_cases import cases
from lockstep.bench.ops import Line, Peaks, _notes, _work, alone, bench_ops, measure
from lockstep.bench.turns import Spread
from lockstep.errors import LockstepError
from lockstep.ops import fused, operators

PEAKS = Peaks(Spread(1e11, 9e10, 2e11), Spread(1e10, 1e10, 1e10))
SAME = {case.name: case for case in cases(QUICK)}


@pytest.mark.parametrize("name", SAME)
def test_both_sides_compute_the_same(name):
    case = SAME[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in case.shapes]
    ops = operators("bitwise")
    given = inputs if case.prepare is None else case.prepare(ops, inputs)
    with torch.no_grad():
        if name == "AdamW":
            other = inputs[0].clone()
            case.ours(ops, *given)
            case.theirs(other, inputs[1])
            ours, theirs = inputs[0], other
        else:
            ours, theirs = case.ours(ops, *given), case.theirs(*inputs)
    if name == "sum of squares":
        theirs = theirs**2
    # float32 on both sides, in another order of sums; AdamW's first step divides m by the root of v, where PyTorch
    # corrects both for their bias and the bench's factors do not: lr times a number near 1 is all that may differ.
    tolerance = 1e-3 if name == "AdamW" else 2e-5
    if "eight bits" in name:  # half a step of 1/127 of a head's largest element, in scores and in values
        tolerance = 1e-2
    both = [(ours, theirs)] if isinstance(theirs, torch.Tensor) else zip(ours, theirs, strict=True)
    for mine, right in both:
        mine = mine.reshape(right.shape)  # SDPA keeps a dimension for the batch
        assert torch.allclose(mine.double(), right.double(), rtol=tolerance, atol=tolerance)


def test_every_operator_is_measured(monkeypatch):
    called, ops = set(), operators("bitwise")

    def told(name, call):
        return lambda *given, **how: (called.add(name), call(*given, **how))[1]

    asked = [f.name for f in fields(ops) if callable(getattr(ops, f.name))]
    recording = replace(ops, **{name: told(name, getattr(ops, name)) for name in asked})
    chains = [name for name, call in vars(fused).items() if isfunction(call) and call.__module__ == fused.__name__]
    for name in chains:
        monkeypatch.setattr(fused, name, told(name, getattr(fused, name)))
    for case in SAME.values():
        inputs = [torch.randn(shape) for shape in case.shapes]
        case.ours(recording, *(inputs if case.prepare is None else case.prepare(recording, inputs)))
    # Pages are written with the rotation, or by what packs for another case; formats of files have no peer.
    assert set(asked) | set(chains) == called | {"write_kv", "write_latents", "dequantize"}


def test_a_side_is_measured_when_it_has_settled(monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr("lockstep.bench.ops.time", clock)

    def number(seconds, settled):
        """Of the call that counts, from 0."""
        calls = itertools.count()

        def side():
            clock.sleep(seconds)
            return float(next(calls)), 0.0

        return alone(side, settled)()[0]

    assert number(0.004, 0.03) == 5  # begins 10, 14 .. 30 ms after the other side's end
    assert number(0.03, 0.03) == 0  # takes as long itself
    assert number(0.004, 0.0) == 0


def test_a_report_has_a_line_for_each_direction(monkeypatch):
    peaks = iter([9e11, *[1e11] * 99])  # a moment that was like no other
    monkeypatch.setattr("lockstep.bench.ops.matrix_meter", lambda dtype: lambda: next(peaks))
    monkeypatch.setattr("lockstep.bench.ops.read_bandwidth", lambda: 1e10)
    told = []
    report = bench_ops(torch.bfloat16, 1, quick=True, note=told.append, only="e")
    assert told == [name for name in SAME if "e" in name]
    parts = [(line["operator"], line["part"]) for line in report.data["lines"]]
    assert ("attention", "forward") in parts
    assert ("attention", "backward") in parts
    assert ("linear + cross-entropy", "both") in parts
    assert ("paged attention, 1 query x 64 keys", "backward") not in parts
    assert all(line["seconds"] > 0 and line["ratio"]["median"] > 0 for line in report.data["lines"])
    assert report.name == "ops-bfloat16"
    assert report.data["matrix_peak"] == {"median": 1e11, "low": 1e11, "high": 9e11}
    line = report.data["lines"][0]
    assert line["share"] == line["rate"] / 1e11
    assert len(report.rows) == len(parts)


def test_operators_that_there_are_not_are_no_empty_table():
    with pytest.raises(LockstepError, match=r"--only nosuch: no operator.* There are: linear .*; att"):
        bench_ops(torch.bfloat16, 1, quick=True, only="nosuch")


def test_pytorchs_faster_dtype_counts(monkeypatch):
    sides = {"ours": 3.0, "torch.bfloat16": 2.0, "torch.float32": 1.0}

    def side(case, dtype, ours):
        value = sides["ours" if ours else str(dtype)]
        return lambda: (value, 2 * value)

    monkeypatch.setattr("lockstep.bench.ops._side", side)
    line, back = measure(SAME["attention"], torch.bfloat16, 3)
    assert (line.theirs, line.ratio, back.ratio) == (
        "float32",
        Spread(1 / 3, 1 / 3, 1 / 3),
        Spread(1 / 3, 1 / 3, 1 / 3),
    )
    assert line.rate == SAME["attention"].flops / 3.0
    assert line.share(PEAKS) == line.rate / 1e11


def test_work_of_products_and_of_memory():
    linear = next(case for case in cases(Sizes()) if case.name == "linear 2048 x 576 -> 1536")
    assert _work(linear, torch.bfloat16, "backward") == 2 * 2 * 2048 * 576 * 1536
    norm = SAME["RMS norm"]
    x, w = 128 * 64, 64
    assert _work(norm, torch.bfloat16, "forward") == 2 * (x + w + x)
    assert _work(norm, torch.bfloat16, "backward") == 2 * (x + w + x + x + w)
    rows, table = 128 * 64, 256 * 64
    assert _work(SAME["embedding"], torch.bfloat16, "forward") == 2 * (rows + rows)
    assert _work(SAME["embedding"], torch.bfloat16, "backward") == 2 * (rows + table)


def test_what_is_slower_is_told_with_its_reason():
    line = Line("it", "forward", 2.0, 1.0, "float32", Spread(0.5, 0.4, 0.6), "GB/s", 1.0, "its order is fixed")
    assert _notes([line], PEAKS)[1] == "it, forward, is slower than PyTorch's, 0.50x: its order is fixed."
