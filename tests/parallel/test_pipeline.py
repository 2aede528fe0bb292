"""Every schedule on ranks as threads: loss and gradients have the bytes of one process, whatever the spread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ranks_as_threads import on_threads
from torch import Tensor

from lockstep.config import ModelConfig
from lockstep.memory.layers import LayerPolicy, recomputing
from lockstep.model.init import draw, random_decoder
from lockstep.ops import Packed, operators
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.partition import Partition
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.reduction import Reduction, global_norm
from lockstep.parallel.schedules import NAMES, schedule
from lockstep.parallel.shards import Cut, Shards
from lockstep.parallel.stages import stages_of
from lockstep.parallel.tree import spread
from lockstep.train import tree as trainer
from lockstep.train.data import Batch
from lockstep.train.step import Compute, step_gradient

KEEP = LayerPolicy()
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def model(layers: int, tied: bool, **more: Any) -> ModelConfig:
    return ModelConfig(vocab_size=70, num_layers=layers, max_positions=64, tie_embeddings=tied, **{**SIZES, **more})


def batches(count: int) -> list[Batch]:
    """Micro-batches of different lengths; some tokens take no loss."""
    found = []
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        lengths = [9 + i % 3, 5]
        tokens = torch.randint(0, 70, (sum(lengths) + 1,), generator=generator)
        targets = torch.where(torch.arange(sum(lengths)) % 5 == 4, -1, tokens[1:])
        found.append(Batch(tokens[:-1], targets, Packed.of(lengths)))
    return found


@functools.cache
def alone(layers: int, tied: bool, count: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[float], float]:
    """Gradients, [objective, loss] and norm of one process."""
    ops = operators("bitwise")
    decoder = random_decoder(model(layers, tied), seed=1)
    parameters = dict(decoder.named_parameters())
    found = step_gradient(decoder, Compute(ops, dtype), parameters, batches(count), z_loss=1e-3)
    norm = trainer.global_norm(found.gradient, ops)
    return dict(zip(parameters, found.gradient, strict=True)), [found.objective, found.loss], norm


def on_mesh(
    mesh: Mesh, name: str, layers: int, tied: bool, count: int, dtype: torch.dtype,
    policy: LayerPolicy = KEEP, per_stage: tuple[int, ...] = (), chunks: int | None = None,
) -> tuple[dict[str, Tensor], float]:  # fmt: skip
    config, ops = model(layers, tied), operators("bitwise")
    mine = spread(count, mesh.shape.dp)[mesh["dp"].index]
    table = schedule(name, mesh.shape.pp, len(mine), chunks=chunks)
    part = Partition(config, mesh, table, stages_of(layers, table, tied, per_stage))
    decoder = part.decoder(lambda name, shape: draw(name, shape, config, 1))
    parameters = {n: p for n, p in decoder.named_parameters() if n in part.used(part.names)}
    held = sorted(i for group in part.groups for i in part.stages.layers[group])
    line = Pipeline(
        mesh["pp"], table, part.stages, decoder, ops, dtype, parameters, recomputing(policy.chosen(held).again)
    )  # fmt: skip
    given = batches(count)
    weight = 1.0 / sum(b.loss_tokens for b in given)
    owned = {n: parameters[n] for n in part.owned(part.names)}
    shards = Shards(owned, {n: part.local_cut(n) for n in owned}, mesh["dp"])
    sums = Reduction(owned, shards, count, size=10_000)  # several buckets

    def finish(m: int, hidden: Tensor) -> Tensor:
        batch = given[mine[m]]
        weights = torch.full(batch.targets.shape, weight, dtype=torch.float32)
        return ops.linear_cross_entropy(hidden, decoder.head_weight, batch.targets, weights, z_loss=1e-3)[0]

    line.step([given[m] for m in mine], finish, lambda n, m, g: sums.put(n, mine[m], g))
    total = sums.total()
    runs = {run: shards.read(total, run) for run in shards.own}
    norm = global_norm(runs, shards, {n: part.cut(n) for n in part.names}, part.names, mesh, ops)
    shards.collect(total)
    return total, norm


def check(results: list[Any], expected: dict[str, Tensor], norm: float) -> None:
    seen = {}
    for total, found in results:
        assert found == norm
        for name, value in total.items():
            assert torch.equal(value, expected[name]), name
            seen[name] = True
    assert seen.keys() == expected.keys()


Threads = Callable[[MeshShape, Callable[[Mesh], Any]], list[Any]]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_two_stages_give_the_bytes_of_one_process(threads: Threads, name: str, tied: bool) -> None:
    expected, _, norm = alone(4, tied, 5, torch.bfloat16)
    check(threads(MeshShape(pp=2), lambda mesh: on_mesh(mesh, name, 4, tied, 5, torch.bfloat16)), expected, norm)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h2", "zb-v", "v-min", "dualpipe-v"])
def test_four_stages(threads: Threads, name: str) -> None:
    expected, _, norm = alone(8, True, 8, torch.float32)
    check(threads(MeshShape(pp=4), lambda mesh: on_mesh(mesh, name, 8, True, 8, torch.float32)), expected, norm)


@pytest.mark.parametrize(("dp", "count"), [(2, 4), (2, 5), (3, 7), (4, 6)])
def test_data_parallel_gives_the_bytes_of_one_process(threads: Threads, dp: int, count: int) -> None:
    expected, _, norm = alone(2, True, count, torch.float32)
    check(threads(MeshShape(dp=dp), lambda mesh: on_mesh(mesh, "gpipe", 2, True, count, torch.float32)), expected, norm)


def test_pipelines_side_by_side_with_uneven_stages_and_recompute(threads: Threads) -> None:
    expected, _, norm = alone(4, True, 5, torch.float32)
    policy = LayerPolicy("none", 1)
    check(
        threads(
            MeshShape(pp=2, dp=2),
            lambda mesh: on_mesh(mesh, "zb-h1", 4, True, 5, torch.float32, policy, per_stage=(3, 1)),
        ),
        expected,
        norm,
    )


@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "v-half"])
def test_recompute_changes_no_bit(threads: Threads, name: str) -> None:
    expected, _, norm = alone(4, False, 5, torch.bfloat16)
    policy = LayerPolicy("full")
    check(
        threads(MeshShape(pp=2), lambda mesh: on_mesh(mesh, name, 4, False, 5, torch.bfloat16, policy)), expected, norm
    )


def test_a_norm_over_blocks_of_many_ranks_is_that_of_one(threads: Threads) -> None:
    """A tensor of several blocks of the sum of squares, cut anywhere."""
    ops = operators("bitwise")
    values = {"a": torch.randn(3, 70_001), "b": torch.randn(5), "c": torch.randn(150_000)}
    expected = trainer.global_norm(values.values(), ops)

    def work(mesh: Mesh) -> float:
        cuts = dict.fromkeys(values, Cut())
        shards = Shards(values, cuts, mesh["dp"])
        assert [run.owner for run in shards.runs] == sorted(run.owner for run in shards.runs)
        for name, tensor in values.items():
            pieces = [(run.start, run.stop) for run in shards.runs if run.name == name]
            assert pieces[0][0] == 0
            assert pieces[-1][1] == tensor.numel()
            assert all(a[1] == b[0] for a, b in pairwise(pieces))
        return global_norm({run: shards.read(values, run) for run in shards.own}, shards, cuts, list(values), mesh, ops)

    for dp in (1, 2, 3, 4):
        assert threads(MeshShape(dp=dp), work) == [expected] * dp


@settings(max_examples=4)
@given(
    st.sampled_from(NAMES), st.sampled_from([(2, 1), (1, 2), (2, 2), (3, 1), (1, 3)]), st.integers(4, 5), st.booleans(),
    st.integers(0, 2),
)  # fmt: skip
def test_any_layout_gives_the_bytes_of_one_process(
    name: str, degrees: tuple[int, int], count: int, tied: bool, recomputed: int
) -> None:
    pp, dp = degrees
    expected, _, norm = alone(6, tied, count, torch.float32)
    policy = LayerPolicy("none", recomputed)
    work = functools.partial(on_mesh, name=name, layers=6, tied=tied, count=count, dtype=torch.float32, policy=policy)
    check(on_threads(MeshShape(pp=pp, dp=dp), work), expected, norm)


def test_a_bucket_is_on_its_way_when_the_next_gradient_comes_or_when_told(threads: Threads) -> None:
    """Buckets begin from the last parameter on, and in that order, whatever comes first; their sums are the tree's."""
    values = {name: torch.ones(300) * i for i, name in enumerate("abc")}

    def work(mesh: Mesh) -> tuple[list[int], Tensor]:
        shards = Shards(values, dict.fromkeys(values, Cut()), mesh["dp"])
        sums, begun = Reduction(values, shards, 4, size=1), []
        first = 2 * mesh.rank
        for name, leaf in (("a", 0), ("c", 0), ("c", 1), ("a", 1), ("b", 0), ("b", 1)):
            sums.put(name, first + leaf, values[name] + first + leaf)
            begun.append(sums.begun)
        sums.begin()
        begun.append(sums.begun)
        total = sums.total()
        shards.collect(total)
        return begun, torch.stack(list(total.values()))

    for begun, total in threads(MeshShape(dp=2), work):
        assert begun == [0, 0, 0, 1, 1, 1, 3]
        assert total.tolist() == [[6.0 + 4 * i] * 300 for i in range(3)]
