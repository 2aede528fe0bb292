"""Which passes run, and the errors for names that are none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from lockstep.compile.passes import PassContext, apply, pass_names, pipeline
from lockstep.errors import LockstepError
from lockstep.memory.recompute import RecomputePolicy
from tests.compile.passes.blocks import config, trained
from tests.compile.passes.graphs import capture, example_inputs

Block = tuple[fx.GraphModule, list[Tensor], tuple[Tensor, ...]]


@pytest.fixture(scope="module")
def block() -> Block:
    """A block's graph, inputs and results."""
    module, inputs = trained(config(qk_norm=True))
    return module, inputs, tuple(module(*inputs))


def copied(graph: fx.Graph) -> fx.Graph:
    other = fx.Graph()
    other.output(other.graph_copy(graph, {}))
    return other


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def names(*args: object, **kwargs: object) -> list[str]:
    return [step.name for step in pipeline(*args, **kwargs)]  # type: ignore[arg-type]


def test_levels() -> None:
    assert names("O0") == []
    assert names("O2") == list(pass_names())
    assert set(names("O1")) <= set(names("O2"))


def test_leave_out_and_keep_only() -> None:
    assert "dead-code" not in names("O2", disable=["dead-code"])
    assert names("O2", only=["dead-code"]) == ["dead-code"]


def test_a_wrong_name_is_told_with_the_nearest() -> None:
    with pytest.raises(LockstepError, match=r"compile.disable_pass: there is no pass 'dead_code'.*mean 'dead-code'"):
        pipeline("O1", disable=["dead_code"])
    with pytest.raises(LockstepError, match=r"compile.only_pass: .*The passes are: .*dead-code"):
        pipeline("O1", only=["zzz"])
    with pytest.raises(LockstepError, match="exclude each other"):
        pipeline("O1", ["dead-code"], ["dead-code"])


def test_a_pass_that_does_not_run_at_the_level_is_told() -> None:
    with pytest.raises(
        LockstepError, match=r"compile.only_pass: dead-code does not run at O0.*leave compile.only_pass"
    ):
        pipeline("O0", only=["dead-code"])
    with pytest.raises(LockstepError, match=r"overlap-collectives needs the whole step.*Set compile.level to O2"):
        pipeline("O1", only=["overlap-collectives"])
    assert "overlap-collectives" not in names("O1", disable=["overlap-collectives"])


@pytest.mark.parametrize("name", pass_names())
def test_each_pass_alone_and_all_but_each_keep_the_bytes_of_a_block(name: str, block: Block) -> None:
    module, inputs, expected = block
    for chosen in (pipeline("O2", only=[name]), pipeline("O2", disable=[name])):
        assert [step.name for step in chosen] == [n for n in pass_names() if (n == name) == (len(chosen) == 1)]
        graph = fx.GraphModule(module, copied(module.graph))
        apply(graph, chosen, PassContext(1, RecomputePolicy("selective")))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(graph(*inputs), expected, strict=True))


def test_the_report_counts_nodes() -> None:
    module = capture(lambda a, b: (a.exp(), a.exp() + b)[1], *example_inputs())
    merged, dropped = apply(module, pipeline("O2", only=["common-subexpressions", "dead-code"]), PassContext())
    assert (merged.before, merged.after, merged.changed) == (3, 2, 1)
    assert (dropped.before, dropped.after, dropped.changed) == (2, 2, 0)
    assert merged.seconds > 0
