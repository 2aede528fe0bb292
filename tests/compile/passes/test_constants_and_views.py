"""Constant folding and view elimination on graphs by hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.compile.passes import PassContext
from lockstep.compile.passes.constants import CONSTANTS
from lockstep.compile.passes.dead import DEAD_CODE
from lockstep.compile.passes.views import VIEWS
from tests.compile.passes.graphs import capture, check, example_inputs, targets


def test_a_chain_of_constants_is_one_number() -> None:
    module = capture(lambda a, b: a + (torch.full((4,), 0.5).to(torch.bfloat16) * -0.0).float(), *example_inputs())
    check(CONSTANTS, module, example_inputs())
    check(DEAD_CODE, module, example_inputs())
    assert targets(module) == ["full.default", "add.Tensor"]
    (full, _) = [n for n in module.graph.nodes if n.op == "call_function"]
    assert math.copysign(1.0, full.args[1]) == -1.0


def test_constants_that_are_written_returned_large_or_uneven_stay() -> None:
    def program(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        written = torch.zeros(4)
        written.add_(a[0])
        return written + a, torch.ones(4) * 2, torch.zeros(1 << 19).sum() + b, torch.arange(4).float() + a

    module = capture(program, *example_inputs())
    changes = check(CONSTANTS, module, example_inputs())
    assert changes.count == 0
    reasons = " / ".join(changes.notes)
    assert "memory of its own" in reasons
    assert "2097152 bytes are more than" in reasons
    assert "not one number everywhere" in reasons


def test_what_is_random_or_not_defined_stays() -> None:
    module = capture(lambda a, b: a + torch.empty(4).uniform_() + torch.rand(4), *example_inputs())
    assert CONSTANTS.run(module, PassContext()).changed == 0


def test_views_that_undo_each_other_are_their_source() -> None:
    module = capture(lambda a, b: a.t().t().unsqueeze(0).squeeze(0).view(16).view(4, 4) + b, *example_inputs())
    check(VIEWS, module, example_inputs())
    check(DEAD_CODE, module, example_inputs())
    assert targets(module) == ["add.Tensor"]


def test_a_chain_of_plain_views_is_one() -> None:
    module = capture(lambda a, b: a.view(16).view(2, 8).unsqueeze(1).exp(), *example_inputs())
    check(VIEWS, module, example_inputs())
    check(DEAD_CODE, module, example_inputs())
    assert targets(module) == ["view.default", "exp.default"]


def test_a_part_is_not_its_whole() -> None:
    module = capture(lambda a, b: (a.view(2, 8)[1:].reshape(8) + 1, a[:2].t() + 1), *example_inputs())
    before = len(targets(module))
    check(VIEWS, module, example_inputs())
    check(DEAD_CODE, module, example_inputs())
    assert len(targets(module)) >= before - 1


def test_a_copy_goes_where_nobody_could_tell() -> None:
    module = capture(lambda a, b: a.clone().exp() + b.t().contiguous(), *example_inputs())
    assert check(VIEWS, module, example_inputs()).count == 1
    assert targets(module).count("clone.default") == 1


def test_a_copy_stays_where_one_of_the_two_is_written_or_returned() -> None:
    def program(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        old = a.clone()
        a.add_(b)
        return old * a, b.clone()

    changes = check(VIEWS, capture(program, *example_inputs()), example_inputs())
    assert changes.count == 0
    assert "one of the two is written" in changes.notes[0]
    assert "it is a result" in changes.notes[1]
