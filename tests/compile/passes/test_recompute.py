"""The recompute split on a small network's joint graph: bytes stay, memory falls, the forward part is untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lockstep.compile.passes import PassContext
from lockstep.compile.passes.recompute import RECOMPUTE, forward_nodes
from lockstep.memory.effects import is_view, storage
from lockstep.memory.recompute import RecomputePolicy
from tests.compile.passes.graphs import capture, check, targets

ROWS, WIDTH = 64, 32


def network(x: Tensor, w: Tensor, u: Tensor, seed: Tensor) -> tuple[Any, ...]:
    """Two products with gates between them; results: y, then the gradients of x, w and u."""
    leaves = [t.detach().requires_grad_() for t in (x, w, u)]
    hidden = (leaves[0].sigmoid() * 2) @ leaves[1]
    y = (hidden.tanh() * hidden.exp()) @ leaves[2]
    return (y, *torch.autograd.grad(y, leaves, seed))


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = [(ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH)]
    return [torch.randn(*size, generator=generator) for size in sizes]


def kept(module: fx.GraphModule) -> int:
    """The bytes that cross from the forward into the backward part, by looking at the finished graph."""
    forward = forward_nodes(module.graph, 1)
    behind = [n for n in module.graph.nodes if n not in forward and n.op == "call_function" and not is_view(n)]
    crossing = {storage(source)[0] for node in behind for source in node.all_input_nodes} & forward
    return sum(n.meta["val"].numel() * 4 for n in crossing if n.op == "call_function")


@pytest.mark.parametrize(
    ("policy", "tensors"),
    [
        (RecomputePolicy(), None),
        (RecomputePolicy("selective"), 1),
        (RecomputePolicy("full"), 0),
        (RecomputePolicy("budget", 2 * ROWS * WIDTH * 4), 2),
    ],
    ids=lambda value: getattr(value, "mode", None),
)
def test_policies(policy: RecomputePolicy, tensors: int | None) -> None:
    module = capture(network, *inputs())
    whole, ahead = kept(module), len(forward_nodes(module.graph, 1))
    changes = check(RECOMPUTE, module, inputs(), forward_outputs=1, recompute=policy)
    assert len(forward_nodes(module.graph, 1)) == ahead
    if tensors is None:
        assert (changes.count, kept(module)) == (0, whole)
    else:
        assert kept(module) <= tensors * ROWS * WIDTH * 4 < whole
        assert "kept for the backward pass" in changes.notes[0]


def test_copies_stand_after_the_forward_part() -> None:
    module = capture(network, *inputs())
    check(RECOMPUTE, module, inputs(), forward_outputs=1, recompute=RecomputePolicy("full"))
    forward, nodes = forward_nodes(module.graph, 1), list(module.graph.nodes)
    copies = [i for i, n in enumerate(nodes) if n.meta.get("recomputed")]
    assert len(copies) >= 6
    assert min(copies) > max(i for i, n in enumerate(nodes) if n in forward)


def test_only_products_stay_under_the_selective_policy() -> None:
    module = capture(network, *inputs())
    before = targets(module).count("mm.default")
    check(RECOMPUTE, module, inputs(), forward_outputs=1, recompute=RecomputePolicy("selective"))
    assert targets(module).count("mm.default") == before


def test_random_and_written_values_are_kept() -> None:
    def program(x: Tensor, seed: Tensor) -> tuple[Any, ...]:
        leaf = x.detach().requires_grad_()
        counter = torch.zeros(ROWS, WIDTH)
        counter.add_(1)
        y = (leaf * torch.rand(ROWS, WIDTH)).exp() * counter
        return (y, *torch.autograd.grad(y, leaf, seed))

    module = capture(program, inputs()[0], inputs()[3])
    drawn = targets(module).count("rand.default")
    RECOMPUTE.run(module, PassContext(1, RecomputePolicy("full")))
    assert targets(module).count("rand.default") == drawn == 1
    assert targets(module).count("add_.Tensor") == 1
    assert any(n.meta.get("recomputed") for n in module.graph.nodes)
