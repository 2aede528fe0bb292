"""The kept tensors of a step hold what tensors made for that step would hold, whatever steps went before."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.ops import PAGE
from lockstep.serve.inputs import Inputs
from lockstep.serve.scheduler import Chunk, Step


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    start, count = draw(st.sampled_from([0, 5, PAGE - 1, PAGE, 3 * PAGE])), draw(st.sampled_from([1, 1, 1, 2, PAGE]))
    pages = tuple(draw(st.lists(st.integers(1, 9), min_size=(start + count - 1) // PAGE + 1, max_size=5)))
    tokens = tuple(draw(st.lists(st.integers(0, 2**31), min_size=count, max_size=count)))
    return Chunk(0, start, tokens, pages, True)


def made_for(step: Step) -> list[Tensor]:
    """Tokens, positions, starts and page table, entry by entry."""
    table = torch.zeros(len(step.chunks), max(len(chunk.pages) for chunk in step.chunks), dtype=torch.int32)
    for row, chunk in zip(table, step.chunks, strict=True):
        row[: len(chunk.pages)] = torch.tensor(chunk.pages)
    starts = torch.tensor([0, *(len(chunk.tokens) for chunk in step.chunks)]).cumsum(0)
    return [
        torch.tensor([token for chunk in step.chunks for token in chunk.tokens]),
        torch.cat([torch.arange(chunk.start, chunk.end, dtype=torch.int32) for chunk in step.chunks]),
        starts.int(),
        table,
    ]


@given(st.lists(st.lists(chunks(), min_size=1, max_size=4).map(lambda some: Step(tuple(some))), max_size=6))
def test_any_steps(steps: list[Step]) -> None:
    inputs = Inputs()
    for step in steps:
        tokens, batch = inputs.fill(step)
        for mine, expected in zip(
            (tokens, batch.positions, batch.starts, batch.page_table), made_for(step), strict=True
        ):
            assert mine.dtype == expected.dtype
            assert torch.equal(mine, expected)


def test_steps_of_one_shape_share_their_tensors() -> None:
    inputs = Inputs()
    first = inputs.fill(Step((Chunk(0, 9, (4,), (1, 2), True), Chunk(1, 3, (5,), (3,), True))))
    again = inputs.fill(Step((Chunk(0, 10, (6,), (1, 2), True), Chunk(1, 4, (7,), (4,), True))))
    assert again[0] is first[0]
    assert again[1] is first[1]
    other = inputs.fill(Step((Chunk(0, 11, (6,), (1, 2), True), Chunk(1, 5, (7, 8), (4,), True))))
    assert other[0] is not first[0]
