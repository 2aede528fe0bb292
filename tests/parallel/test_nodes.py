"""Sums over ranks as operators: the bytes of `Axis.add`, alone, together, and in a compiled block's graph."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lockstep.compile import Compiler
from lockstep.compile.program import Program
from lockstep.compile.stage import block_stage
from lockstep.config import ModelConfig
from lockstep.memory.effects import is_collective, is_wait
from lockstep.model import Decoder
from lockstep.ops import Packed, operators
from lockstep.ops.cut_linear import cut_operators
from lockstep.parallel.collectives import Mesh, Sum
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.nodes import Group, adding
from lockstep.parallel.partition import local_config
from lockstep.parallel.transport import PeerLost

Threads = Callable[[MeshShape, Callable[[Mesh], Any]], list[Any]]
RAW = torch.ops.lockstep_mesh
MODEL = {
    "vocab_size": 70, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4,
    "head_dim": 16, "max_positions": 64, "canonical_tp": 2,
}  # fmt: skip


def values(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_that_are_begun_together_and_waited_for_in_any_order_are_those_of_the_axis(
    threads: Threads, size: int
) -> None:
    shapes = [(5, 3), (70, 300), (1,)]  # the second is large enough to be added up in parts

    def work(mesh: Mesh) -> bool:
        axis = mesh["dp"]
        group = Group(axis)
        own = [values(mesh.rank + 10 * i, *shape) for i, shape in enumerate(shapes)]
        expected = [axis.add(one, torch.bfloat16) for one in own]
        alone = [RAW.all_add(one, torch.bfloat16, group.handle) for one in own]
        together = RAW.all_add_coalesced(own, torch.bfloat16, group.handle)
        found = [RAW.wait(one, group.handle) for one in [*alone, *reversed(together)]]
        right = [*expected, *reversed(expected)]
        return not group.begun and all(torch.equal(a, b) for a, b in zip(found, right, strict=True))

    assert threads(MeshShape(dp=size), work) == [True] * size


@pytest.mark.parametrize("shape", [MeshShape(tp=2), MeshShape(tp=2, dp=2), MeshShape(tp=4, dp=2)], ids=str)
def test_ranks_begin_in_one_order_and_each_waits_when_it_likes(threads: Threads, shape: MeshShape) -> None:
    """A large sum has more to send when its first messages have come: it does before what begins next, along any axis,
    is sent, also where a rank takes over what another hands on."""

    def work(mesh: Mesh) -> bool:
        tp, dp = Group(mesh["tp"]), Group(mesh["dp"])
        own, found = Random(mesh.rank), list[bool]()
        waits: list[Callable[[], bool]] = []

        def later(begun: Tensor, group: Group, right: Tensor) -> None:
            waits.append(lambda: torch.equal(RAW.wait(begun, group.handle), right))

        for turn in range(6):
            group, large = (tp, dp)[turn % 2], values(mesh.rank + turn, 70, 300)
            right = group.axis.add(large, torch.bfloat16)
            later(RAW.all_add(large, torch.bfloat16, group.handle), group, right)
            before = RAW.wait(RAW.take_over([3], tp.handle), tp.handle) if tp.axis.index else values(turn, 3)
            later(RAW.hand_on(before + 1, tp.handle), tp, sum([1.0] * tp.axis.size, values(turn, 3)))
            later(RAW.gather_rows(values(tp.axis.index, 1, 3), tp.axis.size, 1, tp.handle), tp, rows(tp.axis.size))
            while waits and own.random() < 0.7:
                found.append(waits.pop(own.randrange(len(waits)))())
        return all(found) and all(wait() for wait in waits) and not tp.begun and not dp.begun

    def rows(size: int) -> Tensor:
        return torch.cat([values(i, 1, 3) for i in range(size)])

    assert all(threads(shape, work))


def test_a_lost_rank_is_told_as_such_from_within_a_program() -> None:
    class Broken:
        name = "tp"

        def begin_add(self, tensor: Tensor, dtype: torch.dtype) -> Sum:
            raise PeerLost("rank 0 lost the connection to rank 1")

    group = Group(Broken())
    program = Program(groups={"tp": group})
    x, out = program.tensor(torch.ones(3)), program.tensor(torch.empty(3))
    program.call(
        "lockstep_mesh::all_add.out", x, program.constant("dfloat32"), program.constant(f"s{group.handle}"), out
    )
    with pytest.raises(PeerLost, match="rank 0 lost the connection to rank 1"):
        program.run()


def graph(level: str, *disable: str) -> fx.Graph:
    """A block of one of two tensor-parallel ranks, forward and backward."""
    config = ModelConfig(**MODEL)
    decoder = Decoder(local_config(config, 2, config.vocab_size))
    ops = cut_operators(operators("bitwise"), 2, 1, adding("tp"), "over tp")
    batch = Packed.of([2, 3])
    stage = block_stage(decoder.layers[0], ops, batch, decoder.rope_tables(batch)[0], None, torch.bfloat16, True)
    compiler = Compiler(level, disable, keep_graphs=True)
    compiler.compile(stage)
    return compiler.reports[0].after.graph


def begun(found: fx.Graph) -> list[fx.Node]:
    return [node for node in found.nodes if is_collective(node) and not is_wait(node)]


def test_a_blocks_gradients_of_one_value_go_as_one_message() -> None:
    """Two sums forward; backward one for gate and up, one for query, key and value: four messages for seven sums."""
    assert len(begun(graph("O1", "bucket-collectives"))) == 7
    counts = [len(node.args[0]) if isinstance(node.args[0], (list, tuple)) else 1 for node in begun(graph("O1"))]
    assert counts == [1, 1, 2, 3]


def test_gradients_of_weights_are_computed_while_those_of_the_input_are_on_their_way() -> None:
    def hidden(found: fx.Graph) -> list[int]:
        """Products between the beginning and the wait of each message of the backward pass."""
        nodes = list(found.nodes)
        counts = []
        for node in begun(found)[2:]:
            first = nodes.index(node)
            end = next(i for i in range(first, len(nodes)) if is_wait(nodes[i]))
            counts.append(sum("gemm_transposed" in str(one.target) for one in nodes[first:end]))
        return counts

    assert hidden(graph("O2", "overlap-collectives")) == [0, 0]
    assert all(count >= found for count, found in zip(hidden(graph("O2")), [2, 3], strict=True))
