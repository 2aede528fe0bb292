"""When several nodes may be replaced by one operator, with operators made for the test."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node

from lockstep.compile.passes.base import Pass
from lockstep.compile.passes.region import Declined, Region, calls, fuse, plain, views_between
from tests.compile.passes.graphs import capture, check, example_inputs, targets

aten = torch.ops.aten

_LIBRARY = torch.library.Library("lockstep_test_region", "DEF")
_LIBRARY.define("add_exp(Tensor a, Tensor b) -> (Tensor, Tensor)")
_LIBRARY.define("exp_of_sum(Tensor a, Tensor b) -> Tensor")
_LIBRARY.impl("add_exp", lambda a, b: (a + b, (a + b).exp()), "CPU")
_LIBRARY.impl("exp_of_sum", lambda a, b: (a + b).exp(), "CPU")
_LIBRARY.impl("add_exp", lambda a, b: (torch.empty_like(a), torch.empty_like(a)), "Meta")
_LIBRARY.impl("exp_of_sum", lambda a, b: torch.empty_like(a), "Meta")
ADD_EXP = torch.ops.lockstep_test_region.add_exp.default
EXP_OF_SUM = torch.ops.lockstep_test_region.exp_of_sum.default


def _both(node: Node) -> Region | Declined | None:
    """exp(a + b), where the sum is a result too."""
    if not calls(node, aten.exp.default) or not calls(source := plain(node.args[0]), aten.add.Tensor):
        return None
    if source.meta["val"].shape != node.meta["val"].shape:
        return Declined(node, "another shape")
    return Region("add-exp", (source, *views_between(node.args[0], source), node), ADD_EXP, source.args, (source, node))


def _one(node: Node) -> Region | Declined | None:
    found = _both(node)
    if isinstance(found, Region):
        return Region("exp-of-sum", found.nodes, EXP_OF_SUM, found.args, (node,))
    return found


def _pass(finder: Callable[[Node], Region | Declined | None]) -> Pass:
    return Pass.of("test", lambda module, context: fuse(module, finder))


def test_a_region_becomes_one_call_and_keeps_what_others_need() -> None:
    module = capture(lambda a, b: (a + b).exp() * (a + b), *example_inputs())
    other = capture(lambda a, b: (s := a + b, s.exp() * s)[1], *example_inputs())
    assert check(_pass(_both), other, example_inputs()).count == 1
    assert targets(other)[0] == "lockstep_test_region.add_exp.default"
    assert "add.Tensor" not in targets(other)
    fused = next(n for n in other.graph.nodes if n.target is ADD_EXP)
    assert fused.meta["fused"] == ("add-exp", ("add", "exp"))
    assert [v.shape for v in fused.meta["val"]] == [(4, 4), (4, 4)]
    assert check(_pass(_one), module, example_inputs()).count == 1
    assert targets(module)[0] == "lockstep_test_region.exp_of_sum.default"


def test_a_value_that_others_need_declines_with_the_reason() -> None:
    module = capture(lambda a, b: (s := a + b, s.exp() * s)[1], *example_inputs())
    changes = check(_pass(_one), module, example_inputs())
    assert changes.count == 0
    assert changes.notes == ("exp-of-sum of add, exp: add is needed by mul",)


def test_views_are_seen_through() -> None:
    module = capture(lambda a, b: (a + b).view(16).view(4, 4).exp(), *example_inputs())
    assert check(_pass(_one), module, example_inputs()).count == 1
    assert targets(module) == ["lockstep_test_region.exp_of_sum.default"]
    turned = capture(lambda a, b: (a + b).t().exp(), *example_inputs())
    assert check(_pass(_one), turned, example_inputs()).count == 0


def test_a_finder_may_decline() -> None:
    module = capture(lambda a, b: (a + b).view(16).exp(), *example_inputs())
    assert check(_pass(_one), module, example_inputs()).notes == ("exp: another shape",)


def test_a_write_in_between_declines() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        total = a + b
        a.mul_(2)
        return total.exp()

    changes = check(_pass(_one), capture(program, *example_inputs()), example_inputs())
    assert changes.count == 0
    assert "mul_ stands in between and has an effect" in changes.notes[0]


def test_a_result_that_is_written_declines() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        total = a + b
        y = total.exp()
        total.mul_(2)
        return y + total

    assert "written later" in check(_pass(_both), capture(program, *example_inputs()), example_inputs()).notes[0]


def test_an_early_user_moves_the_call_and_a_late_input_forbids_it() -> None:
    def early(a: Tensor, b: Tensor) -> Tensor:
        total = a + b
        used = total * 2
        return total.exp() + used

    assert check(_pass(_both), capture(early, *example_inputs()), example_inputs()).count == 1

    def crossing(node: Node) -> Region | None:
        """Of `(a + b) -> exp` and an input that is made from the sum: a cycle if replaced."""
        if not calls(node, aten.mul.Tensor):
            return None
        total, middle = node.args
        assert isinstance(total, Node)
        assert isinstance(middle, Node)
        return Region("cycle", (total, node), ADD_EXP, (middle, total.args[0]), (total, node))

    module = capture(lambda a, b: (s := a + b, s * s.exp())[1], *example_inputs())
    assert "comes after one of its results is used" in check(_pass(crossing), module, example_inputs()).notes[0]
