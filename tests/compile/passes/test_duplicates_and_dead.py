"""Common subexpressions and dead code, on graphs by hand and on random ones."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.compile.passes import PassContext, apply
from lockstep.compile.passes.dead import DEAD_CODE
from lockstep.compile.passes.duplicates import DUPLICATES
from tests.compile.passes.graphs import capture, check, example_inputs, targets


def test_an_equal_value_is_computed_once() -> None:
    module = capture(lambda a, b: (a * 2 + b).exp() + (a * 2 + b).exp(), *example_inputs())
    assert check(DUPLICATES, module, example_inputs()).count == 3
    assert targets(module) == ["mul.Tensor", "add.Tensor", "exp.default", "add.Tensor"]


def test_numbers_of_other_types_and_signs_are_not_equal() -> None:
    module = capture(lambda a, b: ((a * 0.0) / b, (a * -0.0) / b, a + 1, a + 1.5), *example_inputs())
    assert check(DUPLICATES, module, example_inputs()).count == 0


def test_a_write_in_between_keeps_both() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        first = a.exp()
        a.add_(b)
        return first * a.exp()

    module = capture(program, *example_inputs())
    assert check(DUPLICATES, module, example_inputs()).count == 0


def test_memory_that_is_written_is_not_shared() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        x, y = torch.zeros(4, 4), torch.zeros(4, 4)
        x.add_(a)
        return x * (y + b)

    module = capture(program, *example_inputs())
    check(DUPLICATES, module, example_inputs())
    assert targets(module).count("zeros.default") == 2


def test_two_equal_outputs_stay_two_tensors() -> None:
    module = capture(lambda a, b: (a + b, a + b), *example_inputs())
    changes = check(DUPLICATES, module, example_inputs())
    assert changes.count == 0
    assert "each is an output" in changes.notes[0]


def test_results_of_an_operator_with_several_are_shared() -> None:
    module = capture(lambda a, b: a.max(dim=0)[0] + a.max(dim=0)[0] * b, *example_inputs())
    check(DUPLICATES, module, example_inputs())
    assert [t for t in targets(module) if "max" in t] == ["max.dim"]


def test_random_draws_are_never_shared_nor_dropped() -> None:
    module = capture(lambda a, b: (torch.rand(4) + torch.rand(4), torch.rand(2))[0], *example_inputs())
    apply(module, [DUPLICATES, DEAD_CODE], PassContext())
    assert targets(module).count("rand.default") == 3


def test_dead_code_goes_and_writes_that_are_read_stay() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        kept, dropped = torch.zeros(4, 4), torch.zeros(4, 4)
        kept.add_(a)
        dropped.view(16)[2:5].add_(1)
        (a.exp() + b).sum()
        b.mul_(2)
        return kept + 1

    module = capture(program, *example_inputs())
    assert check(DEAD_CODE, module, example_inputs()).count == 7
    assert targets(module) == ["zeros.default", "add_.Tensor", "mul_.Tensor", "add.Tensor"]
