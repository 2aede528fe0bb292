"""Which values are computed again, on a block by hand and on random ones."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.memory.recompute import RecomputePolicy, Value, choose, kept_bytes, recomputed_flops

NORM, GATE, UP, ACT = range(1, 5)
BLOCK = [
    Value(0, (), again=False, needed=True),  # x, an input
    Value(100, (0,), flops=400, needed=True),  # norm
    Value(300, (NORM,), flops=60000, needed=True),  # gate
    Value(300, (NORM,), flops=60000, needed=True),  # up
    Value(300, (GATE, UP), flops=1800, needed=True),  # gated
]


def test_modes() -> None:
    assert choose(RecomputePolicy("none"), BLOCK) == frozenset()
    assert choose(RecomputePolicy("selective"), BLOCK) == {NORM, ACT}
    assert choose(RecomputePolicy("full"), BLOCK) == {NORM, GATE, UP, ACT}
    assert kept_bytes(BLOCK, {NORM, ACT}) == 600
    assert kept_bytes(BLOCK, {NORM, GATE, UP, ACT}) == 0
    assert recomputed_flops(BLOCK, {NORM, ACT}) == 2200


def test_a_budget_takes_the_cheapest_first() -> None:
    assert choose(RecomputePolicy("budget", 1000), BLOCK) == frozenset()
    assert choose(RecomputePolicy("budget", 900), BLOCK) == {NORM}
    assert choose(RecomputePolicy("budget", 600), BLOCK) == {NORM, ACT}
    assert choose(RecomputePolicy("budget", 300), BLOCK) in ({NORM, ACT, GATE}, {NORM, ACT, UP})
    assert choose(RecomputePolicy("budget", 0), BLOCK) == {NORM, GATE, UP, ACT}


def test_what_would_free_nothing_is_kept() -> None:
    widened = [Value(0, (), again=False), Value(200, (0,), flops=1e9), Value(200, (1,), needed=True)]
    assert choose(RecomputePolicy("selective"), widened) == frozenset()


@st.composite
def graphs(draw: st.DrawFn) -> list[Value]:
    found: list[Value] = []
    for i in range(draw(st.integers(1, 7))):
        sources = tuple(draw(st.sets(st.integers(0, i - 1), max_size=2))) if i else ()
        size, flops = draw(st.integers(0, 9)), draw(st.integers(0, 100))
        found.append(Value(size, sources, flops, draw(st.booleans()), draw(st.booleans())))
    return found


@given(graphs(), st.integers(0, 40))
def test_choices_are_allowed_useful_and_meet_the_budget(values: list[Value], budget: int) -> None:
    everything = kept_bytes(values, ())
    for mode in ("selective", "full"):
        chosen = choose(RecomputePolicy(mode), values)  # type: ignore[arg-type]
        assert all(values[i].again for i in chosen)
        assert kept_bytes(values, chosen) <= everything
    able = [i for i, value in enumerate(values) if value.again]
    least = min(kept_bytes(values, set(c)) for n in range(len(able) + 1) for c in combinations(able, n))
    assert kept_bytes(values, choose(RecomputePolicy("full"), values)) <= everything
    chosen = choose(RecomputePolicy("budget", budget), values)
    if all(value.size or not value.again for value in values) and least == kept_bytes(values, set(able)) <= budget:
        assert kept_bytes(values, chosen) <= budget
