"""The drawing in layers: edges go down, nothing overlaps, a chain is straight."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.compile.layout import layout


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    count = draw(st.integers(1, 14))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=20, unique=True)) if pairs else []
    return count, edges


@given(graphs())
def test_edges_go_down_and_boxes_are_apart(graph: tuple[int, list[tuple[int, int]]]) -> None:
    count, edges = graph
    drawn = layout(edges, [0] * count)
    assert len(drawn.places) == count
    for (a, b), path in zip(edges, drawn.paths, strict=True):
        assert path[0] == drawn.places[a]
        assert path[-1] == drawn.places[b]
        assert [layer for _, layer in path] == list(range(path[0][1], path[-1][1] + 1))
        assert path[0][1] < path[-1][1]
    for i, (x, layer) in enumerate(drawn.places):
        assert all(abs(x - y) > 0.999 for y, other in drawn.places[:i] if other == layer)


def test_a_chain_is_straight_and_inputs_stand_by_their_users() -> None:
    chain = layout([(0, 1), (1, 2), (2, 3)], [0] * 4)
    assert len({round(x, 9) for x, _ in chain.places}) == 1
    late = layout([(0, 1), (1, 2), (2, 4), (3, 4)], [0] * 5)
    assert late.places[3][1] == late.places[4][1] - 1


def test_the_backward_band_stands_below_the_forward_one() -> None:
    drawn = layout([(0, 2), (1, 2), (2, 3), (0, 3), (0, 4), (1, 4)], [0, 0, 0, 0, 1])
    layers = [layer for _, layer in drawn.places]
    assert layers[2] < layers[3] < layers[4]
