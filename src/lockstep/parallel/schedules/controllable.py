"""V-Half and V-Min: the V placement with a half or a third of 1F1B's activations (arXiv 2405.15362).

A building block says in which slot a micro-batch does its four passes on every device; it is repeated every six slots,
the time that a micro-batch takes on a device. Then the start and the end of the schedule, where slots stay empty, are
squeezed: each pass moves to the earliest free slot after its inputs that does not raise the peak of activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.parallel.schedules.table import Step, Table

PERIOD = 6
F0, F1, B1, B0, W = range(5)  # the passes of a micro-batch on a device, in their order
IDLE = -1

Slots = list[list[int]]  # of one device: for every pass, the slot of every micro-batch; W in the order of the B


def v_half(stages: int, micro_batches: int) -> Table:
    """Peak (p + 2) // 2 micro-batches of a whole device."""
    p, delay = stages, 3 if stages % 2 == 0 else 0
    block = [(2 * s, 3 * p - s - 2, 3 * p + delay + 2 * s - 1, 6 * p + delay - s - 2) for s in range(p)]
    return _repeated("v-half", block, micro_batches)


def v_min(stages: int, micro_batches: int) -> Table:
    """Peak (p + 4) // 3 micro-batches of a whole device; long bubbles unless F, B and W take about the same time."""
    p, delay = stages, 2 if stages % 3 == 0 else 0
    block = [(s, 2 * p - s - 1, 2 * p + delay + s, 4 * p + delay - s - 1) for s in range(p)]
    return _repeated("v-min", block, micro_batches)


def _repeated(name: str, block: Sequence[tuple[int, ...]], micro_batches: int) -> Table:
    devices = [[[first + PERIOD * m for m in range(micro_batches)] for first in passes] for passes in block]
    with_weights = [[*slots, _weight_slots(slots)] for slots in devices]
    cap = max(_peak(_layout(slots)) for slots in with_weights)
    # Once with the weight gradients in fixed places, once (the end only) with them wherever a slot is left.
    squeezed = _packed(name, _Squeeze(with_weights, cap, start=True).slots)
    squeezed = _Squeeze([slots[:W] for slots in squeezed], cap, start=False).slots
    packed = _packed(name, [[*slots, _weight_slots(slots)] for slots in squeezed])
    return _table(name, [slots[:W] for slots in packed])


class _Pass(NamedTuple):
    slot: int
    device: int
    kind: int
    number: int  # the micro-batch; of a W, its place in the device's queue


class _Squeeze:
    """Moves the passes of the start (if asked) and of the end of a schedule to earlier slots.

    ``slots`` is the result.
    """

    def __init__(self, slots: list[Slots], cap: int, start: bool) -> None:
        self.slots, self.cap = [[list(row) for row in device] for device in slots], cap
        self.layouts = [_layout(device) for device in slots]
        self.done = [np.zeros(len(layout), bool) for layout in self.layouts]
        order = sorted(_passes(slots))
        steady = next(i for i, p in enumerate(order) if (p.device, p.kind) == (0, B0))
        last = (F0, len(slots[0][F0]) - 1)
        end = next((i for i, p in enumerate(order) if i >= steady and (p.kind, p.number) == last), len(order))
        for i, this in enumerate(order):
            movable = i > end or (start and i < steady)
            slot = self.earliest(this) if movable else this.slot
            self.done[this.device][slot] = True

    def earliest(self, this: _Pass) -> int:
        """Moves one pass, whose predecessors are in their final places, and returns its slot."""
        layout, taken = self.layouts[this.device], self.done[this.device]
        layout[this.slot] = IDLE
        for slot in range(self.latest_input(this) + 1, this.slot):
            if taken[slot]:
                continue
            layout[slot] = this.kind
            if _peak(layout, explicit=len(self.slots[0]) > W) <= self.cap:
                self.slots[this.device][this.kind][this.number] = slot
                return slot
            layout[slot] = IDLE
        layout[this.slot] = this.kind
        return this.slot

    def latest_input(self, this: _Pass) -> int:
        """The last slot of what this pass must follow."""
        device, kind, index = this.device, this.kind, this.number
        mine = self.slots[device]
        if kind == W:
            inputs = [sorted(mine[B1] + mine[B0])[index]]
        else:
            inputs = [mine[kind - 1][index]] if kind > F0 else []
            neighbour = device - 1 if kind in (F0, B1) else device + 1
            if 0 <= neighbour < len(self.slots):
                inputs.append(self.slots[neighbour][kind][index])
        if index > 0:
            inputs.append(mine[kind][index - 1])
        return max(inputs, default=-1)


def _passes(devices: list[Slots]) -> Iterator[_Pass]:
    for device, slots in enumerate(devices):
        for kind, row in enumerate(slots):
            for index, slot in enumerate(row):
                yield _Pass(slot, device, kind, index)


def _layout(slots: Slots) -> NDArray[np.int64]:
    """What one device does in every slot."""
    layout = np.full(1 + max(map(max, slots)), IDLE)
    for kind, row in enumerate(slots):
        layout[row] = kind
    return layout


def _weight_slots(slots: Slots) -> list[int]:
    """Weight gradients in the idle slots, each as soon as one is pending; the rest behind the end."""
    layout, found, pending = _layout(slots), [], 0
    for slot, kind in enumerate(layout):
        if kind in (B1, B0):
            pending += 1
        elif kind == IDLE and pending:
            found.append(slot)
            pending -= 1
    return found + list(range(len(layout), len(layout) + pending))


def _peak(layout: NDArray[np.int64], explicit: bool = True) -> int:
    """The most activations held, in chunks. Not ``explicit``: an idle slot does a weight gradient if one is pending."""
    forwards = np.cumsum((layout == F0) | (layout == F1))
    if explicit:
        return int((forwards - np.cumsum(layout == W)).max())
    backwards = np.cumsum((layout == B1) | (layout == B0))
    balance = backwards - np.cumsum(layout == IDLE)
    pending = balance - np.minimum(np.minimum.accumulate(balance), 0)  # a walk that cannot fall below zero
    return int((forwards - backwards + pending).max())


def _table(name: str, devices: list[Slots]) -> Table:
    """The steps in the order of their slots; a weight gradient of chunk 1 goes before one of chunk 0."""
    words = {F0: ("F", 0), F1: ("F", 1), B1: ("B", 1), B0: ("B", 0)}
    rows = []
    for slots in devices:
        at = {
            slot: Step(words[kind][0], i, words[kind][1])
            for kind, row in enumerate(slots)
            for i, slot in enumerate(row)
        }
        pending: tuple[list[Step], list[Step]] = ([], [])
        row: list[Step] = []
        for slot in range(max(at) + 1):
            if slot in at:
                row.append(at[slot])
                if at[slot].kind == "B":
                    pending[at[slot].chunk].append(at[slot]._replace(kind="W"))
            elif pending[1] or pending[0]:
                row.append((pending[1] or pending[0]).pop(0))
        rows.append((*row, *pending[1], *pending[0]))
    return Table(name, len(devices), len(devices[0][F0]), 2, "v", tuple(rows))


def _packed(name: str, devices: list[Slots]) -> list[Slots]:
    """The same order on every device, every pass as early as its inputs allow, one slot each."""
    end: dict[tuple[int, int, int], int] = {}
    free = [0] * len(devices)
    for this in sorted(_passes(devices)):
        slot = free[this.device]
        if this.kind != W:
            neighbour = this.device - 1 if this.kind in (F0, B1) else this.device + 1
            slot = max(slot, end.get((neighbour, this.kind, this.number), 0))
        end[this.device, this.kind, this.number] = free[this.device] = slot + 1
    return [
        [[end[d, kind, i] - 1 for i in range(len(row))] for kind, row in enumerate(slots)]
        for d, slots in enumerate(devices)
    ]
