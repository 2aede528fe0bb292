"""Can a table be executed? Every step once, in the order of its dependencies, and without a deadlock.

The same walk gives the order in which a simulator or a single process can go through the steps of all devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lockstep.parallel.schedules.table import KINDS, ScheduleError, Step, Table


class Need(NamedTuple):
    """What a step waits for from a neighbouring group: the activation (F) or the gradient (B) of a micro-batch."""

    forward: bool
    micro_batch: int
    group: int


def check(table: Table) -> Table:
    """Returns the table if it is valid, otherwise raises :class:`ScheduleError` that says what to change."""
    if len(table.rows) != table.stages:
        raise ScheduleError(
            f"{table.name}: {len(table.rows)} rows for {table.stages} devices; write one row per device."
        )
    for device, row in enumerate(table.rows):
        _check_row(table, device, row)
    for _ in walk(table):
        pass
    return table


def needs(table: Table, device: int, step: Step) -> list[Need]:
    """What ``step`` of ``device`` needs from the steps of other groups (on this or another device)."""
    found = []
    for part in step.parts:
        group = table.group(device, part.chunk)
        if part.kind == "F" and group > 0:
            found.append(Need(True, part.micro_batch, group - 1))
        elif part.kind in ("B", "BW") and group < table.groups - 1:
            found.append(Need(False, part.micro_batch, group + 1))
    return found


def gives(table: Table, device: int, step: Step) -> list[Need]:
    """The needs of others that ``step`` of ``device`` fulfils when it ends."""
    return [Need(p.kind == "F", p.micro_batch, table.group(device, p.chunk)) for p in step.parts if p.kind != "W"]


def walk(table: Table) -> Iterator[tuple[int, int]]:
    """All (device, index in its row), each after everything it depends on. Raises if the devices wait in a circle."""
    at = [0] * table.stages
    done: set[Need] = set()
    waiting: dict[Need, int] = {}
    ready = list(range(table.stages - 1, -1, -1))
    while ready:
        device = ready.pop()
        row = table.rows[device]
        while at[device] < len(row):
            step = row[at[device]]
            missing = next((need for need in needs(table, device, step) if need not in done), None)
            if missing is not None:
                waiting[missing] = device
                break
            yield device, at[device]
            at[device] += 1
            for given in gives(table, device, step):
                done.add(given)
                if given in waiting:
                    ready.append(waiting.pop(given))
    if waiting:
        raise ScheduleError(_circle(table, at, {device: need for need, device in waiting.items()}))


def _check_row(table: Table, device: int, row: tuple[Step, ...]) -> None:
    where = f"{table.name}: device {device}"
    place: dict[tuple[str, int, int], int] = {}
    for index, step in enumerate(row):
        for part in step.parts:
            if part.kind not in KINDS or part.chunk >= table.chunks or part.micro_batch >= table.micro_batches:
                raise ScheduleError(
                    f"{where} has the step {part}, but there are {table.micro_batches} micro-batches and "
                    f"{table.chunks} chunks, both counted from 0. Remove the step."
                )
            for kind in "BW" if part.kind == "BW" else part.kind:
                key = (kind, part.micro_batch, part.chunk)
                if key in place:
                    raise ScheduleError(
                        f"{where} does {Step(*key)} twice, as steps {place[key]} and {index}. Remove one."
                    )
                place[key] = index
        if step.partner is not None and (step.kind, step.partner.kind) != ("F", "BW"):
            raise ScheduleError(
                f"{where}, step {index}: {step} overlaps; only a forward with a full backward (F&BW) can."
            )
    for micro_batch in range(table.micro_batches):
        for chunk in range(table.chunks):
            _check_order(where, row, place, micro_batch, chunk)


def _check_order(where: str, row: tuple[Step, ...], place: dict[tuple[str, int, int], int], m: int, c: int) -> None:
    absent = [str(Step(kind, m, c)) for kind in "FBW" if (kind, m, c) not in place]
    if absent:
        raise ScheduleError(f"{where} never does {', '.join(absent)}. Add what is missing.")
    f, b, w = (place[kind, m, c] for kind in "FBW")
    if not f < b or not b <= w:
        raise ScheduleError(
            f"{where} does micro-batch {m} of chunk {c} in the order {row[f]} (step {f}), {row[b]} (step {b}), "
            f"{row[w]} (step {w}); the order must be F, then B, then W. Swap them."
        )


def _circle(table: Table, at: list[int], blocked: dict[int, Need]) -> str:
    """The circle of waiting devices, from any blocked device on: each waits for a step of the next."""
    device, path = next(iter(blocked)), list[int]()
    while device not in path:
        path.append(device)
        device = table.holder(blocked[device].group)[0]
    circle = path[path.index(device) :]
    links = []
    for device in circle:
        need = blocked[device]
        holder, chunk = table.holder(need.group)
        wanted = Step("F" if need.forward else "B", need.micro_batch, chunk)
        links.append(
            f"device {device} stands before {table.rows[device][at[device]]} and waits for {wanted} of device {holder}"
        )
    return (
        f"{table.name} deadlocks: " + "; ".join(links) + ". Move one of the awaited steps before the step that stands."
    )
