"""The executor and the lowering: any function of tensors as a program gives the bytes of calling it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.compile import CannotCompile
from lockstep.compile.program import Program
from lockstep.compile.recipe import Call, NotAffine, Place, Recipe, Scratch, View, merge
from lockstep.compile.sink import sink
from lockstep.ops import build
from tests.compile.models import same

build.load()


def check(function, *inputs: Tensor) -> None:
    sunk = sink(function, *inputs)
    for scale in (1.0, -3.0):
        scaled = [x * scale if x.is_floating_point() else x for x in inputs]
        assert same(list(sunk(*scaled)), list(function(*scaled)))


X = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2 + 1,),
        lambda x: (x.tanh() * 0.5, (x + x).sum(0), x.t()),
        lambda x: (x,),
        lambda x: (x.view(3, 20)[1:, ::2] + 1, x[2:4]),
        lambda x: (torch.cat([x, x * 2], dim=1), torch.stack([x, x])),
        lambda x: (x.to(torch.bfloat16) * 0.1, x.to(torch.float64)),
        lambda x: (torch.zeros(3) + x[:3, 0], torch.full((2,), 7.0) * x[0, 0], torch.ones_like(x) / x),
        lambda x: (torch.empty(10).copy_(x[0]).mul_(3.0),),
        lambda x: (x + torch.tensor(1.5), x * torch.arange(10) + torch.eye(6, 10)),
        lambda x: (x.sort().values, x.topk(2).indices),
        lambda x: (torch.where(x > 0, x, torch.zeros_like(x)), x.square().sum().sqrt()),
        lambda x: tuple(x.split(2)) + tuple(x.unbind(1)),
    ],
)
def test_a_function_keeps_its_bytes(function):
    check(function, X)


def test_operators_without_an_out_form_are_copied():
    check(lambda x: (torch.nn.functional.gelu(x), torch.ops.aten.native_layer_norm(x, [10], None, None, 1e-5)[0]), X)


def test_lists_of_numbers_that_grow_with_the_rows_are_lines_through_both_captures():
    one, two = (Recipe((), (), (), (), (f"l{rows},4,{2 * rows}", "l1,2"), (), ()) for rows in (10, 30))
    assert merge(one, 10, two, 30).constants == ("m0,1,4,0,0,2", "l1,2")
    with pytest.raises(NotAffine, match="a size is 100 with 10 rows and 900 with 30"):
        merge(replace(one, constants=("l100",)), 10, replace(one, constants=("l900",)), 30)
    with pytest.raises(NotAffine, match="becomes"):
        merge(replace(one, constants=("l1",)), 10, replace(one, constants=("l1,2",)), 30)


def test_an_index_selects_rows():
    rows = torch.tensor([1, 3, 1])
    check(lambda x, rows: (x[rows] * 2,), X, rows)


def test_what_looks_at_values_cannot_be_compiled():
    with pytest.raises(CannotCompile, match="function"):
        sink(lambda x: (x * float(x.sum()),), X)
    with pytest.raises(CannotCompile):
        sink(lambda x: (x[x > 0],), X)


def test_inputs_of_another_shape_are_refused():
    sunk = sink(lambda x: (x + 1,), X)
    with pytest.raises(ValueError, match="x0"):
        sunk(X[:3])
    with pytest.raises(ValueError, match="x0"):
        sunk(X.double())


OPERATIONS = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b * 0.5,
    "sin": lambda a, b: a.sin(),
    "write": lambda a, b: a.clone().add_(b),
    "turn": lambda a, b: a.t().contiguous(),
    "roll": lambda a, b: torch.cat([a[1:], b[:1]]),
    "narrow": lambda a, b: a.to(torch.bfloat16).float() - b,
    "mean": lambda a, b: a.mean(0, keepdim=True) + b,
    "view": lambda a, b: a.view(-1).view(a.shape) + b,
}


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9)), max_size=14))
def test_any_chain_keeps_its_bytes(steps):
    """Values die at different times, so the arena's places are used again and again."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [x, y]
        for name, i, j in steps:
            values.append(OPERATIONS[name](values[i % len(values)], values[j % len(values)]))
        return tuple(values[-2:])

    x = torch.linspace(-2, 2, 64).view(8, 8)
    sunk = sink(function, x, x.flip(0).contiguous())
    assert same(list(sunk(x, x * 3)), list(function(x, x * 3)))


def recipe(rows: int, size: int) -> Recipe:
    place = Place("x", "float32", ((size, 0),))
    view = View(0, "float32", (0, 0), ((size, 0),), ((1, 0),))
    return Recipe((place,), (place,), (Scratch((size * 4, 0), 0, 0),), (view,), (f"i{size}",), (Call("a", (2,)),), (0,))


def test_sizes_are_lines_over_the_rows():
    merged = merge(recipe(47, 47 * 3 + 2), 47, recipe(79, 79 * 3 + 2), 79)
    assert merged.inputs[0].sizes == ((2, 3),)
    assert merged.scratch[0].size == (8, 12)
    assert merged.constants == ("a2,3",)
    assert merge(recipe(47, 5), 47, recipe(79, 5), 79) == recipe(0, 5)


@pytest.mark.parametrize("size", [lambda r: r * r, lambda r: r // 2, lambda r: -(-r // 16), lambda r: 100 - r])
def test_other_sizes_are_refused(size):
    with pytest.raises(NotAffine):
        merge(recipe(47, size(47)), 47, recipe(79, size(79)), 79)


def test_a_program_tells_which_call_failed_and_can_go_on():
    program = Program()
    x, y = program.tensor(torch.ones(3)), program.tensor(torch.ones(4))
    program.call("aten::neg.out", x, x)
    program.call("aten::add.out", x, y, program.constant("i1"), x)
    with pytest.raises(RuntimeError, match=r"call 1 of a program: aten::add\.out"):
        program.run()
    program.bind([y], [torch.full((3,), 5.0)])
    program.run()
    assert program.value(x).tolist() == [6.0] * 3


def test_views_follow_what_is_bound_and_the_rows():
    program = Program()
    memory = program.tensor(torch.arange(12, dtype=torch.float32))
    view = program.place(memory, 4, Place("x", "float32", ((0, 1), (2, 0))))  # [rows, 2] from the second element on
    program.resize(3)
    assert program.value(view).tolist() == [[1, 2], [3, 4], [5, 6]]
    program.resize(1)
    program.bind([memory], [torch.arange(12, dtype=torch.float32) * 10])
    assert program.value(view).tolist() == [[10, 20]]
    program.resize(6)
    with pytest.raises(RuntimeError, match="too many rows"):
        program.value(view)


_MEMORY = 24
_CHANGES = st.one_of(
    st.tuples(st.just("rows"), st.integers(1, 3)), st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 99)),
    st.tuples(st.just("grow"), st.integers(0, 3)),
)  # fmt: skip


@given(st.lists(_CHANGES, min_size=1, max_size=8))
def test_any_changes_are_seen_by_whatever_rests_on_them(changes):
    """Two memories; views of each, of views, that grow or do not; more views on the way."""
    program, rows, where = Program(), 1, dict[int, tuple[str, int, int]]()
    held = {name: torch.arange(_MEMORY) * 1.0 for name in "ab"}
    values = dict(zip("ab", program.tensors(held.values()), strict=True))

    def view(name: str, base: int, first: int, slope: int) -> int:
        place = Place("x", "float32", ((1, slope), (2, 0)))
        made = program.place(base, 4 * (first - where.get(base, ("", 0, 0))[1]), place)
        where[made] = name, first, slope
        return made

    for name in "ab":
        view(name, view(name, values[name], 1, 1), 3, 0)
    for what, number in changes:
        if what == "rows":
            rows = number
            program.resize(rows)
        elif what == "grow":
            name = "ab"[number % 2]
            view(name, values[name], number, number // 2)
        else:
            held[what] = torch.arange(_MEMORY) * 1.0 + number
            program.bind([values[what]], [held[what]])
        for made, (name, first, slope) in where.items():
            expected = held[name][first : first + 2 * (1 + slope * rows)].view(-1, 2)
            assert torch.equal(program.value(made), expected)


def test_wrong_calls_are_refused():
    program = Program()
    with pytest.raises(RuntimeError, match="value 7 of"):
        program.call("aten::neg.out", 7, 7)
    with pytest.raises(RuntimeError, match="takes 2 arguments, got 1"):
        program.call("aten::neg.out", program.tensor(X))
    with pytest.raises(RuntimeError, match="no_such_operator"):
        program.call("aten::no_such_operator.out")
