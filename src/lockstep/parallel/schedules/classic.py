"""The schedules with an undivided backward: GPipe, 1F1B and interleaved 1F1B."""

from __future__ import annotations

from lockstep.parallel.schedules.table import Step, Table, without


def gpipe(stages: int, micro_batches: int) -> Table:
    """All forwards, then all backwards (arXiv 1811.06965)."""
    row = tuple(Step(kind, m) for kind in ("F", "BW") for m in range(micro_batches))
    return Table("gpipe", stages, micro_batches, 1, "loop", (row,) * stages)


def one_f_one_b(stages: int, micro_batches: int) -> Table:
    """Device s warms up with min(p - 1 - s, m) forwards, then alternates, then drains (arXiv 2104.04473)."""
    forwards = [Step("F", m) for m in range(micro_batches)]
    backwards = [Step("BW", m) for m in range(micro_batches)]
    rows = tuple(alternate(forwards, backwards, stages - 1 - s) for s in range(stages))
    return Table("1f1b", stages, micro_batches, 1, "loop", rows)


def interleaved(stages: int, micro_batches: int, chunks: int) -> Table:
    """1F1B over ``chunks`` groups per device, taken in turns of ``stages`` micro-batches (arXiv 2104.04473).

    Warm-up of min(2 (p - s - 1) + (v - 1) p, v m) forwards. If ``stages`` does not divide the micro-batches, the steps
    of those that would fill the last turn are left out.
    """
    turns = -(-micro_batches // stages)
    forwards, backwards = [], []
    for first in range(0, turns * stages, stages):
        turn = range(first, first + stages)
        forwards += [Step("F", m, c) for c in range(chunks) for m in turn]
        backwards += [Step("BW", m, c) for c in reversed(range(chunks)) for m in turn]
    rows = tuple(alternate(forwards, backwards, 2 * (stages - s - 1) + (chunks - 1) * stages) for s in range(stages))
    return without(Table("interleaved", stages, turns * stages, chunks, "loop", rows), micro_batches)


def alternate(forwards: list[Step], backwards: list[Step], warm_up: int) -> tuple[Step, ...]:
    """``warm_up`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    row = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += [forward, backward]
    return tuple(row + backwards[len(forwards) - warm_up :])
