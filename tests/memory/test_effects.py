"""What nodes do to memory, against what happens to real tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from torch import Tensor, fx

from lockstep.memory.effects import is_pure, is_view, storage, written
from tests.compile.passes.graphs import capture, example_inputs, programs


class _Watch(fx.Interpreter):
    """Runs a graph and keeps each node's value, and whose bytes changed while it ran."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module, garbage_collect_values=False)
        self.changed: dict[fx.Node, set[fx.Node]] = {}

    def run_node(self, n: fx.Node) -> object:
        before = {node: value.clone() for node, value in self.env.items() if isinstance(value, Tensor)}
        result = super().run_node(n)
        self.changed[n] = {node for node, old in before.items() if not torch.equal(self.env[node], old)}
        return result


@settings(max_examples=15)
@given(programs(writes=True))
def test_storages_and_writes_are_those_of_the_run(program: Callable[..., tuple[Tensor, ...]]) -> None:
    module = capture(program, *example_inputs())
    watch = _Watch(module)
    watch.run(*example_inputs())
    tensors = {node: value for node, value in watch.env.items() if isinstance(value, Tensor)}
    for a, x in tensors.items():
        for b, y in tensors.items():
            if x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr():
                assert storage(a) == storage(b), (a, b)
    for node, changed in watch.changed.items():
        assert {storage(c) for c in changed} <= {storage(w) for w in written(node)}


def test_kinds_of_nodes() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        top, low = a.split(2)
        best, _ = b.max(dim=0)
        top.add_(best)
        return low + torch.rand(2, 4)

    nodes = {n.name: n for n in capture(program, *example_inputs()).graph.nodes}
    assert storage(nodes["getitem_1"])[0].name == storage(nodes["add_"])[0].name == nodes["split"].args[0].name
    assert is_view(nodes["getitem_1"])
    assert not is_view(nodes["getitem_2"])
    assert storage(nodes["getitem_2"]) == (nodes["max_1"], 0)
    assert not is_pure(nodes["add_"])
    assert not is_pure(nodes["rand"])
    assert is_pure(nodes["max_1"])
