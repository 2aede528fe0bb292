"""Rows that ranks share as operators: the bytes of `RankRows`, begun together, and every rank's graph in one order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from lockstep.compile import Compiler, recipe
from lockstep.compile.stage import block_stage, loss_stage
from lockstep.config import ModelConfig
from lockstep.memory.effects import is_collective, is_wait
from lockstep.model import Decoder
from lockstep.ops import Packed, operators
from lockstep.ops.row_share import RowShare, row_shares
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.nodes import Group
from lockstep.parallel.partition import Partition
from lockstep.parallel.row_nodes import RowNodes
from lockstep.parallel.row_ranks import RankRows
from lockstep.parallel.schedules import schedule
from lockstep.parallel.stages import stages_of
from lockstep.train.dryrun import _Nobody

Threads = Callable[[MeshShape, Callable[[Mesh], Any]], list[Any]]
MODEL = {
    "vocab_size": 70, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4,
    "head_dim": 16, "max_positions": 64, "canonical_tp": 2,
}  # fmt: skip


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [4, 7, 9, 10])
@pytest.mark.parametrize(("size", "step"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_rows_go_where_those_of_the_ranks_go(threads: Threads, size: int, step: int, count: int) -> None:
    unit = size * step

    def work(mesh: Mesh) -> bool:
        axis = mesh["cp"]
        rows, group = RankRows(axis, step), Group(axis)
        rows.begin(count)
        share = RowShare(size, axis.index, count % unit, step)
        nodes = RowNodes(group.handle, share)
        own, part = values(axis.index, share.own_rows(count // unit), 4 * size, 3), values(10 + axis.index, count, 5)

        def go_on(before: Tensor | None) -> Tensor:
            return part[0] if before is None else before * 1.5 + part[0]

        whole = values(3, count, 2)
        mine, theirs = (
            [
                side.own(whole), side.gather(own), side.to_rows(side.to_heads(own)), side.to_heads(own),
                side.add(part, torch.bfloat16), side.total(part), side.hand_on(go_on, (5,)),
            ]
            for side in (nodes, rows)
        )  # fmt: skip
        return not group.begun and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))

    assert threads(MeshShape(cp=size), work) == [True] * size


@given(members=st.integers(1, 6), step=st.integers(1, 4), count=st.integers(0, 200))
def test_runs_begin_at_whole_steps_and_are_nearly_alike(members: int, step: int, count: int) -> None:
    shares = row_shares(count, members, step)
    starts = list(itertools.accumulate(shares, initial=0))
    assert starts.pop() == count
    assert not [start for start in starts if start % step and start < count]
    assert max(shares) - min(shares) <= step
    for i, (start, own) in enumerate(zip(starts, shares, strict=True)):
        share = RowShare(members, i, count % (members * step), step)
        assert share.run(count) == (start, own)
        assert share.all_rows(share.units(own)) == count


def test_messages_that_are_begun_together_are_ended_in_any_order(threads: Threads) -> None:
    """A sum over four ranks sends again when its first messages have come, and some wait for it after others do."""
    raw, counts = torch.ops.lockstep_mesh, [3, 2, 2, 2]

    def work(mesh: Mesh) -> bool:
        axis = mesh["tp"]
        group, own = Group(axis), values(axis.index, counts[axis.index], 4)
        total = raw.all_add(values(9 + axis.index, 5), torch.float32, group.handle)
        rows = raw.gather_rows(own, sum(counts), 1, group.handle)
        for begun in (rows, total) if axis.index % 2 else (total, rows):
            raw.wait(begun, group.handle)
        expected = torch.cat([values(i, n, 4) for i, n in enumerate(counts)])
        sums = (values(9, 5) + values(10, 5)) + (values(11, 5) + values(12, 5))
        return torch.equal(rows, expected) and torch.equal(total, sums)

    assert threads(MeshShape(tp=4), work) == [True] * 4


def collectives(rank: int, rest: int, level: str, what: str, **sizes: int) -> list[str]:
    """What a rank's graph of a block, or of the head with its loss, sends, in order, without what only later ranks take
    over."""
    config, shape = ModelConfig(**MODEL), MeshShape(**sizes)
    mesh = Mesh(shape, _Nobody(rank, shape.size))
    stages = stages_of(2, schedule("1f1b", 1, 1), False)
    part = Partition(config, mesh, schedule("1f1b", 1, 1), stages, sequence_parallel=True)
    decoder, batch = Decoder(part.local), Packed.of([2, 3])
    ops = part.operators(operators("bitwise"), captured=True, rest=rest)
    if what == "head":
        stage = loss_stage(decoder, ops, torch.bfloat16, 0.0, True)
    else:
        stage = block_stage(decoder.layers[0], ops, batch, decoder.rope_tables(batch)[0], None, torch.bfloat16, True)
    compiler = Compiler(level, keep_graphs=True)
    compiler.compile(stage)
    names = [name_of(node) for node in begun(compiler.reports[0].after)]
    if rank == 0:
        assert "take_over" not in names
    kept = [name for name in names if name != "take_over"]
    halves = compiler._done[0][1]
    recipes = [one for one in (halves.forward, halves.backward) if one is not None]
    assert [name.partition(".")[0] for one in recipes for name in recipe.begun(one)] == [
        f"lockstep_mesh::{name}" for name in kept
    ]
    if not any(name.endswith("_coalesced") for name in names):  # passes keep the order of the graph as it was captured
        assert names == [name_of(node) for node in begun(compiler.reports[0].before)]
    return kept


def begun(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if is_collective(node) and not is_wait(node)]


def name_of(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


CASES = {
    "O1 block, tp": (("O1", "block", {"tp": 2}), {"add_rows", "gather_rows", "hand_on"}),
    "O2 block, tp": (("O2", "block", {"tp": 2}), {"add_rows", "gather_rows", "hand_on"}),
    "O2 head, tp": (("O2", "head", {"tp": 2}), {"gather_rows", "part_of_loss", "all_add", "hand_on"}),
    "O2 block, cp": (("O2", "block", {"cp": 2}), {"rows_to_heads", "heads_to_rows"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_sends_the_same_in_the_same_order(case: str) -> None:
    (level, what, sizes), expected = CASES[case]
    found = [collectives(rank, 1, level, what, **sizes) for rank in range(2)]
    assert found[0] == found[1]
    assert {name.removesuffix("_coalesced") for name in found[0]} >= expected
