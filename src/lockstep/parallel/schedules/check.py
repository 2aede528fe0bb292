"""Can a table be executed? Every step once, in the order of its dependencies, and without a deadlock."""

from __future__ import annotations

from lockstep.parallel.schedules.table import KINDS, ScheduleError, Step, Table


def check(table: Table) -> Table:
    """Returns the table if it is valid, otherwise raises :class:`ScheduleError` that says what to change."""
    assert table.program  # laying a table out checks its rows, and finds a deadlock if there is one
    return table


def check_rows(table: Table) -> None:
    """Every step once, on the device that holds its chunk, a micro-batch's F before its B before its W."""
    if len(table.rows) != table.stages:
        raise ScheduleError(
            f"{table.name}: {len(table.rows)} rows for {table.stages} devices; write one row per device."
        )
    for device, row in enumerate(table.rows):
        _check_row(table, device, row)


def _check_row(table: Table, device: int, row: tuple[Step, ...]) -> None:
    where = f"{table.name}: device {device}"
    place: dict[tuple[str, int, int], int] = {}
    for index, step in enumerate(row):
        for part in (step,) if step.partner is None else step.parts:
            if part.kind not in KINDS or part.chunk >= table.chunks or part.micro_batch >= table.micro_batches:
                raise ScheduleError(
                    f"{where} has the step {part}, but there are {table.micro_batches} micro-batches and "
                    f"{table.chunks} chunks, both counted from 0. Remove the step."
                )
            for kind in part.kind:  # BW is both
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
    f, b, w = place.get(("F", m, c)), place.get(("B", m, c)), place.get(("W", m, c))
    if f is None or b is None or w is None:
        absent = [str(Step(kind, m, c)) for kind in "FBW" if (kind, m, c) not in place]
        raise ScheduleError(f"{where} never does {', '.join(absent)}. Add what is missing.")
    if not f < b or not b <= w:
        raise ScheduleError(
            f"{where} does micro-batch {m} of chunk {c} in the order {row[f]} (step {f}), {row[b]} (step {b}), "
            f"{row[w]} (step {w}); the order must be F, then B, then W. Swap them."
        )
