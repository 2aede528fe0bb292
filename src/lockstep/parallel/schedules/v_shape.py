"""The hand-made schedules of the V placement, two chunks per device: ZB-V and DualPipeV.

Both are written for enough micro-batches (2p - 1 and 2p). With fewer, the full form is made and the steps of the
micro-batches that do not exist are left out, which keeps every dependency.
"""

from __future__ import annotations

from lockstep.parallel.schedules.table import Step, Table, without


class _Row:
    """One device's steps under construction: the next micro-batch of every kind and chunk, and the queue of W."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.next: dict[tuple[str, int], int] = {}
        self.pending: list[Step] = []

    def take(self, kind: str, chunk: int) -> Step:
        """The next step of a kind; the kinds of backward share one count."""
        key = ("F" if kind == "F" else "W" if kind == "W" else "B", chunk)
        micro_batch = self.next.get(key, 0)
        self.next[key] = micro_batch + 1
        return Step(kind, micro_batch, chunk)

    def add(self, *words: str) -> None:
        """Appends steps written as kind and chunk, ``F0``; ``B`` queues its weight gradient."""
        for word in words:
            step = self.take(word[:-1], int(word[-1]))
            self.steps.append(step)
            if step.kind == "B":
                self.pending.append(step._replace(kind="W"))

    def count(self, word: str) -> int:
        return self.next.get((word[0], int(word[1])), 0)

    def weight(self) -> None:
        """Appends the oldest queued weight gradient."""
        self.steps.append(self.pending.pop(0))

    def pair(self, forward: int, backward: int) -> None:
        """Appends a forward of one chunk overlapped with a full backward of the other."""
        self.steps.append(self.take("F", forward)._replace(partner=self.take("BW", backward)))


def zb_v(stages: int, micro_batches: int) -> Table:
    """ZB-V (arXiv 2405.15362): no bubble if F = B = W, with 1F1B's memory."""
    full = max(micro_batches, 2 * stages - 1)
    rows = tuple(_zb_v_row(stages, full, s) for s in range(stages))
    return without(Table("zb-v", stages, full, 2, "v", rows), micro_batches)


def _zb_v_row(p: int, m: int, s: int) -> tuple[Step, ...]:
    row = _Row()
    row.add(*["F0"] * (2 * (p - s) - 1))
    row.add(*["F1", "F0"] * s)
    row.add(*["F1", "B1", "W1"] * (p - s))
    while row.count("F1") < m:
        row.add(*(["F0"] if row.count("F0") < m else []), "B0", "W0", "F1", "B1", "W1")
    row.add(*["B0", "B1"] * s)
    row.add(*["B0", "W0"] * (p - s))
    row.add(*["W1"] * (m - row.count("W1")), *["W0"] * (m - row.count("W0")))
    return tuple(row.steps)


def dualpipe_v(stages: int, micro_batches: int) -> Table:
    """DualPipeV (the V-shaped cut of DualPipe, arXiv 2412.19437): forwards overlapped with full backwards."""
    full = max(micro_batches, 2 * stages)
    rows = tuple(_dualpipe_v_row(stages, full, s) for s in range(stages))
    return without(Table("dualpipe-v", stages, full, 2, "v", rows), micro_batches)


def _dualpipe_v_row(p: int, m: int, s: int) -> tuple[Step, ...]:
    row, after, upto = _Row(), p - s - 1, s + 1
    row.add(*["F0"] * (2 * after), *["F0", "F1"] * upto)
    for _ in range(after):
        row.add("B1")
        row.weight()
        row.add("F1")
    for i in range(m - 2 * p + upto):
        if i == 0 and s == p - 1:  # the last device has nothing to overlap with yet: its two chunks follow each other
            row.add("F0", "BW1")
        else:
            row.pair(0, 1)
        row.pair(1, 0)
    for _ in range(after):
        row.add("BW1")
        row.pair(1, 0)
    # Half of these leave their weight gradients for the gaps of the cool-down.
    for i in range(2 * upto):
        row.add(f"{'B' if i > upto - 1 else 'BW'}{(i + 1) % 2}")
    for _ in range(after):
        row.weight()
        row.add("B0")
    while row.pending:
        row.weight()
    return tuple(row.steps)
