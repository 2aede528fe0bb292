"""Every schedule by its name."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import numpy as np

from lockstep.given import instance, number, whole
from lockstep.parallel.schedules.classic import gpipe, interleaved, one_f_one_b
from lockstep.parallel.schedules.controllable import v_half, v_min
from lockstep.parallel.schedules.greedy import greedy
from lockstep.parallel.schedules.greedy_v import zb_v_for
from lockstep.parallel.schedules.table import ScheduleError, Table
from lockstep.parallel.schedules.times import StageTimes
from lockstep.parallel.schedules.v_shape import dualpipe_v
from lockstep.parallel.schedules.zero_bubble import zb_h1, zb_h2

FIXED = {  # one order, whatever the times
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
}
GREEDY = {"zb-1p": 1, "zb-2p": 2}  # made for the given times; the default cap in units of p micro-batches
CHUNKS = dict.fromkeys((*FIXED, *GREEDY), 1) | dict.fromkeys(("zb-v", "v-half", "v-min", "dualpipe-v"), 2)
NAMES = (*CHUNKS, "interleaved")  # the only one whose number of chunks is free

UNIT = StageTimes(1.0, 1.0, 1.0)
MOST_STEPS = 1 << 22
"""Forwards and backwards of all stages of a table: seconds to make, and about 1 GB."""


def schedule(
    name: str,
    stages: int,
    micro_batches: int,
    times: StageTimes = UNIT,
    comm: float = 0.0,
    chunks: int | None = None,
    activation_cap: float | Sequence[float] | None = None,
    m_w: float = 0.5,
) -> Table:
    """The table of a schedule.

    ``times`` (of one chunk, where there are chunks) and ``comm`` shape ``zb-v``, ``zb-1p`` and ``zb-2p``, and ``m_w``
    (the part of the activations that stays between B and W) the last two; the other schedules have one order.
    ``chunks``: layer groups per device, for ``interleaved`` (2 unless given); the others have one or two.
    ``activation_cap``: the most activations a device may hold, in micro-batches of a whole device, or one number per
    device; ``zb-1p`` and ``zb-2p`` are built to meet it (p and 2 p unless given). Any other schedule raises
    :class:`ScheduleError` if it needs more.
    """
    if name not in NAMES:
        near = get_close_matches(str(name).lower(), NAMES, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ScheduleError(f"schedule {name!r} is unknown; {hint}The schedules are {', '.join(NAMES)}.")
    stages = whole(stages, f"{name}: stages", error=ScheduleError)
    micro_batches = whole(micro_batches, f"{name}: micro_batches", error=ScheduleError)
    _check_chunks(name, chunks)
    check_size(name, stages, micro_batches, chunks or CHUNKS.get(name) or 2)
    instance(times, StageTimes, f"{name}: times", error=ScheduleError)
    number(comm, f"{name}: comm", error=ScheduleError)
    number(m_w, f"{name}: m_w", most=1.0, error=ScheduleError)
    if name in GREEDY:
        cap = per_device(GREEDY[name] * stages if activation_cap is None else activation_cap, stages)
        table = greedy(name, stages, micro_batches, times, comm, cap, m_w)
    elif name == "zb-v":
        table = zb_v_for(stages, micro_batches, times, comm)
    elif name == "interleaved":
        table = interleaved(stages, micro_batches, chunks or 2)
    else:
        table = FIXED[name](stages, micro_batches)
    if activation_cap is not None and name not in GREEDY:
        _check_cap(table, per_device(activation_cap, stages))
    return table


def peak(table: Table, device: int) -> float:
    """The most activations that a device holds, in micro-batches of a whole device; W frees everything."""
    now = most = 0
    for step in table.rows[device]:
        for part in step.parts:
            now += {"F": 1, "B": 0, "W": -1, "BW": -1}[part.kind]
            most = max(most, now)
    return most / table.chunks


def _check_chunks(name: str, chunks: int | None) -> None:
    wanted = CHUNKS.get(name)
    if chunks is not None and whole(chunks, f"{name}: chunks", error=ScheduleError) != (wanted or chunks):
        raise ScheduleError(f"{name}: chunks is {chunks}; it must be {wanted}. Change it or leave it out.")


def check_size(name: str, stages: int, micro_batches: int, chunks: int) -> None:
    """A table is a list of steps: one that no machine can hold is refused before it is begun."""
    steps = 2 * stages * micro_batches * chunks
    if steps > MOST_STEPS:
        raise ScheduleError(
            f"{name}: {micro_batches:,} micro-batches on {stages:,} stages are {steps:,} steps; a schedule has at most "
            f"{MOST_STEPS:,}. Give fewer, larger micro-batches."
        )


def per_device(cap: float | Sequence[float], stages: int) -> list[float]:
    """An activation cap, one number or one per device, as one per device."""
    given = list(cap) if isinstance(cap, (Sequence, np.ndarray)) and not isinstance(cap, str) else [cap] * stages
    if len(given) != stages:
        raise ScheduleError(f"activation_cap has {len(given)} numbers; give one, or {stages} (one per device).")
    return [number(c, "activation_cap", above=True, error=ScheduleError) for c in given]


def _check_cap(table: Table, caps: list[float]) -> None:
    for device, cap in enumerate(caps):
        needed = peak(table, device)
        if needed > cap * (1 + 1e-9):
            raise ScheduleError(
                f"{table.name} holds {needed:g} micro-batches of activations on device {device}; activation_cap is "
                f"{cap:g}. Raise the cap, or take a schedule that obeys one (zb-1p) or needs less (v-half, v-min)."
            )
