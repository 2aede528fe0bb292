"""Buffers of graphs, and the arena that comes of them, against a run with every byte watched."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from torch import Tensor, fx

from lockstep.memory.arena import plan
from lockstep.memory.effects import storage
from lockstep.memory.liveness import liveness
from lockstep.memory.overlap import check
from tests.compile.passes.graphs import capture, example_inputs, programs, run, same


def test_views_and_writes_keep_a_buffer_alive() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        x = a.exp()
        top = x.t()[:2]
        y = b + 1
        y.mul_(2)
        z = y.sum()
        return top + z

    module = capture(program, *example_inputs())
    steps = {n.name: i for i, n in enumerate(module.graph.nodes)}
    found = liveness(module.graph)
    spans = {where[0].name: (b.size, b.first, b.last) for where, b in zip(found.owners, found.buffers, strict=True)}
    assert spans == {
        "exp": (64, steps["exp"], steps["add_1"]),
        "add": (64, steps["add"], steps["sum_1"]),
        "sum_1": (4, steps["sum_1"], steps["add_1"]),
    }


def test_several_results_have_a_buffer_each() -> None:
    module = capture(lambda a, b: a.max(dim=0)[0] + b, *example_inputs())
    found = liveness(module.graph, keep_outputs=True)
    assert [(where[0].name, where[1], b.size) for where, b in zip(found.owners, found.buffers, strict=True)] == [
        ("max_1", 0, 16), ("max_1", 1, 32), ("add", 0, 64),
    ]  # fmt: skip


class _InArena(fx.Interpreter):
    """Runs a graph with every allocated value moved into one block of memory, which starts full of NaN."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        found = liveness(module.graph)
        arena = plan(found.buffers)
        assert check(found.buffers, arena) == []
        self.block = torch.full((arena.peak // 4 + 16,), torch.nan).view(torch.uint8)
        self.places = dict(zip(found.owners, arena.offsets, strict=True))

    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            return self._moved(result, n, 0)
        if isinstance(result, tuple) and n.op == "call_function" and storage(n)[0] is n:
            return tuple(self._moved(x, n, i) for i, x in enumerate(result))
        return result

    def _moved(self, x: Tensor, n: fx.Node, index: int) -> Tensor:
        offset = self.places.get((n, index))
        if offset is None or storage(n)[0] is not n:
            return x
        moved = torch.empty(0, dtype=x.dtype).set_(
            self.block.untyped_storage(), offset // x.element_size(), x.size(), x.stride()
        )
        return moved.copy_(x)


@settings(max_examples=15)
@given(programs(writes=True))
def test_a_run_in_the_arena_gives_the_same_bytes(program: Callable[..., tuple[Tensor, ...]]) -> None:
    module = capture(program, *example_inputs())
    expected = run(module, example_inputs())
    own = [x.clone() for x in example_inputs()]
    found = _InArena(module).run(*own)
    assert same(expected, [*found, *own])
