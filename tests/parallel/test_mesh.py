"""The mesh as a value: coordinates and ranks, groups, what does not factor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import LockstepError
from lockstep.parallel.mesh import AXES, MeshShape

degrees = st.integers(1, 4)
shapes = st.builds(MeshShape, pp=degrees, dp=degrees, cp=degrees, tp=degrees)


@given(shapes)
def test_rank_and_place_are_inverse(shape: MeshShape) -> None:
    places = [shape.place(rank) for rank in range(shape.size)]
    assert [shape.rank(**{a: p[a] for a in AXES}) for p in places] == list(range(shape.size))
    assert len({tuple(p.values()) for p in places}) == shape.size


@given(shapes, st.sampled_from(AXES))
def test_groups_of_an_axis_partition_the_ranks(shape: MeshShape, axis: str) -> None:
    groups = {shape.group(rank, axis) for rank in range(shape.size)}
    assert sorted(rank for group in groups for rank in group) == list(range(shape.size))
    for group in groups:
        assert [shape.place(rank)[axis] for rank in group] == list(range(getattr(shape, axis)))


def test_tensor_parallel_ranks_are_neighbours_and_stages_are_far() -> None:
    shape = MeshShape(pp=2, dp=2, tp=2)
    assert shape.group(0, "tp") == (0, 1)
    assert shape.group(0, "dp") == (0, 2)
    assert shape.group(0, "pp") == (0, 4)
    assert shape.describe() == "pp2 dp2 tp2"


def test_experts_regroup_the_data_ranks_of_a_stage() -> None:
    shape = MeshShape(dp=4, tp=2, ep=2)
    assert shape.size == 8
    assert shape.group(0, "ep") == (0, 2)
    assert shape.group(5, "ep") == (5, 7)
    assert [shape.place(rank)["ep"] for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_wrong_degrees_are_told() -> None:
    with pytest.raises(LockstepError, match=r"pp 1 x dp 3 x cp 1 x tp 2 = 6 ranks, but 4 processes .* start 6"):
        MeshShape(dp=3, tp=2).check_world(4)
    with pytest.raises(LockstepError, match=r"parallel\.dp is 0"):
        MeshShape(dp=0)
    with pytest.raises(LockstepError, match=r"ep 3 does not divide dp x cp = 4"):
        MeshShape(dp=4, ep=3)
