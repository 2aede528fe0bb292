"""The arena's plans: sound by two other ways of checking, close to the lower bound, fast."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.memory.arena import Arena, Buffer, lower_bound, plan, without_reuse
from lockstep.memory.overlap import check


@st.composite
def many(draw: st.DrawFn) -> list[Buffer]:
    length = draw(st.integers(1, 40))
    found = []
    for _ in range(draw(st.integers(0, 40))):
        first = draw(st.integers(0, length - 1))
        last = draw(st.integers(first, length - 1))
        found.append(Buffer(draw(st.integers(0, 500)), first, last, draw(st.sampled_from([1, 8, 64]))))
    return found


def painted(buffers: list[Buffer], arena: Arena) -> bool:
    """The oracle of the oracle: colour every byte at every step; True if no byte is coloured twice."""
    taken: set[tuple[int, int]] = set()
    for b, offset in zip(buffers, arena.offsets, strict=True):
        cells = {(t, x) for t in range(b.first, b.last + 1) for x in range(offset, offset + b.size)}
        if taken & cells:
            return False
        taken |= cells
    return True


@given(many())
def test_any_plan_is_sound(buffers: list[Buffer]) -> None:
    arena = plan(buffers)
    assert check(buffers, arena) == []
    assert painted(buffers, arena)
    assert lower_bound(buffers) <= arena.peak
    assert arena.peak <= without_reuse(buffers) + 64 * len(buffers)


@given(many(), st.data())
def test_the_checker_finds_exactly_the_broken_plans(buffers: list[Buffer], data: st.DataObject) -> None:
    offsets = tuple(8 * data.draw(st.integers(0, 60)) for _ in buffers)
    buffers = [replace(b, align=8) for b in buffers]
    arena = Arena(offsets, max((o + b.size for o, b in zip(offsets, buffers, strict=True)), default=0))
    assert (check(buffers, arena) == []) == painted(buffers, arena)


def test_the_checker_tells_of_edges_and_alignment() -> None:
    buffers = [Buffer(64, 0, 1), Buffer(64, 1, 2)]
    assert check(buffers, Arena((0, 64), 128)) == []
    assert check(buffers, Arena((0, 32), 128)) == [
        "buffer 1 at 32 is not aligned to 64",
        "buffers 0 and 1 overlap in memory and time",
    ]
    assert check(buffers, Arena((0, 64), 100)) == ["buffer 1 at 64 of 64 bytes is outside the arena of 100"]


def step_like(layers: int) -> list[Buffer]:
    """As of a training step: activations kept for the backward pass, temporaries, gradients kept to the end."""
    found, t = [], 0
    kept: list[tuple[int, int]] = []
    for _ in range(layers):
        for size in (4096, 1024, 4096, 2048, 512, 512, 2048, 64, 4096, 11008, 11008, 11008, 64):
            kept.append((size * 64, t))
            found.append(Buffer(size * 48, t, t + 2))
            found.append(Buffer(size * 96, t + 1, t + 4))
            t += 3
    end = t + len(kept) * 4 + 100
    for size, first in reversed(kept):
        found.append(Buffer(size, first, t + 3))
        found += [Buffer(size, t, t + 5), Buffer(size * 2, t + 1, t + 3), Buffer(size // 4, t + 2, end)]
        t += 4
    return found


@pytest.mark.parametrize("layers", [1, 2, 4, 12])
def test_a_step_takes_at_most_five_percent_more_than_must_be(layers: int) -> None:
    buffers = step_like(layers)
    arena = plan(buffers)
    assert check(buffers, arena) == []
    assert arena.peak <= 1.05 * lower_bound(buffers)
    assert arena.peak <= 0.6 * without_reuse(buffers)


def test_a_deep_step_is_planned_fast() -> None:
    buffers = step_like(250)
    assert len(buffers) > 19000
    begun = time.process_time()
    arena = plan(buffers)
    spent = time.process_time() - begun
    assert arena.peak <= 1.05 * lower_bound(buffers)
    assert check(buffers, arena) == []
    assert spent < 10.0  # about 1 s of an idle processor
