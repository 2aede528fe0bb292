"""ZB-H1 and ZB-H2: 1F1B with the weight gradients split off and used as filling (arXiv 2401.10241)."""

from __future__ import annotations

from lockstep.parallel.schedules.classic import one_f_one_b
from lockstep.parallel.schedules.table import Step, Table


def zb_h1(stages: int, micro_batches: int) -> Table:
    """1F1B's order; on device s the oldest W runs after a B as soon as more than s are pending. 1F1B's memory."""
    order = one_f_one_b(stages, micro_batches).rows
    rows = []
    for s in range(stages):
        row: list[Step] = []
        weights = 0
        for step in order[s]:
            row.append(step._replace(kind="F" if step.kind == "F" else "B"))
            if step.kind == "BW" and step.micro_batch + 1 - weights > s:
                row.append(Step("W", weights))
                weights += 1
        rows.append(_with_tail(row, weights, micro_batches))
    return Table("zb-h1", stages, micro_batches, 1, "loop", tuple(rows))


def zb_h2(stages: int, micro_batches: int) -> Table:
    """Twice the warm-up, min(2 (p - s) - 1, m); then B, W if more than 2 s are pending, F if any is left."""
    rows = []
    for s in range(stages):
        forwards, weights = min(2 * (stages - s) - 1, micro_batches), 0
        row = [Step("F", m) for m in range(forwards)]
        for m in range(micro_batches):
            row.append(Step("B", m))
            if m + 1 - weights > 2 * s:
                row.append(Step("W", weights))
                weights += 1
            if forwards < micro_batches:
                row.append(Step("F", forwards))
                forwards += 1
        rows.append(_with_tail(row, weights, micro_batches))
    return Table("zb-h2", stages, micro_batches, 1, "loop", tuple(rows))


def _with_tail(row: list[Step], weights: int, micro_batches: int) -> tuple[Step, ...]:
    return (*row, *(Step("W", m) for m in range(weights, micro_batches)))
