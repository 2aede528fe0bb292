"""Tensor parallelism: every degree that divides canonical_tp gives the same bytes, alone and with the other axes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config import ModelConfig
from lockstep.config.check import check
from lockstep.errors import LockstepError
from lockstep.memory.layers import recomputing
from lockstep.model import Decoder
from lockstep.model.init import draw, random_decoder
from lockstep.ops import KVPages, Packed, Paged, operators
from lockstep.ops.cut_linear import WeightQueue, alone, cut_operators, deferring
from lockstep.ops.linear import input_gradient, rows_together
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.partition import Partition
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.reduction import Reduction, global_norm
from lockstep.parallel.schedules import schedule
from lockstep.parallel.shards import Shards
from lockstep.parallel.stages import stages_of
from lockstep.parallel.tree import spread

Threads = Callable[[MeshShape, Callable[[Mesh], Any]], list[Any]]

BASE = {
    "vocab_size": 70, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4,
    "head_dim": 16, "max_positions": 64, "tie_embeddings": True,
}  # fmt: skip
FAMILIES = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
BITWISE = operators("bitwise")
LENGTHS = (12, 9)


def model(family: str = "llama", canonical_tp: int = 4, **more: Any) -> ModelConfig:
    return ModelConfig(**{**BASE, "family": family, "canonical_tp": canonical_tp, **FAMILIES[family], **more})


def batch(seed: int, lengths: Sequence[int] = LENGTHS) -> tuple[Tensor, Packed]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 70, (sum(lengths),), generator=generator), Packed.of([*lengths])


class _Batch:
    def __init__(self, seed: int, lengths: Sequence[int]) -> None:
        self.tokens, self.packed = batch(seed, lengths)


def trained(
    mesh: Mesh, config: ModelConfig, count: int, dtype: torch.dtype, name: str = "1f1b", rows: bool = False,
    lengths: Sequence[int] = LENGTHS,
) -> tuple[dict[str, Tensor], float, list[float]]:  # fmt: skip
    """Gradients of this rank (its slices), the norm, the objectives of its micro-batches."""
    mine = spread(count, mesh.shape.dp)[mesh["dp"].index]
    table = schedule(name, mesh.shape.pp, len(mine))
    stages = stages_of(config.num_layers, table, config.tie_embeddings)
    part = Partition(config, mesh, table, stages, sequence_parallel=rows, row_step=rows_together(dtype))
    ops = part.operators(BITWISE)
    decoder = part.decoder(lambda name, shape: draw(name, shape, config, 1))
    parameters = {n: p for n, p in decoder.named_parameters() if not p.is_meta}
    call = recomputing({0} if rows else ())
    line = Pipeline(
        mesh["pp"], table, part.stages, decoder, ops, dtype, parameters, call, part.rows, contexts=part.contexts,
        first_token=part.first_token,
    )  # fmt: skip
    owned, objectives = {n: parameters[n] for n in part.owned(part.names)}, []
    shards = Shards(owned, {n: part.local_cut(n) for n in owned}, mesh["dp"])
    sums = Reduction(owned, shards, count, size=10_000)

    def finish(m: int, hidden: Tensor) -> Tensor:
        tokens = batch(mine[m], lengths)[0]
        weights = torch.full(tokens.shape, 1 / (3 * len(tokens)))
        objective, _ = ops.linear_cross_entropy(hidden, decoder.head_weight, tokens.roll(-1), weights)[:2]
        objectives.append(float(objective.detach()))
        return objective

    line.step([_Batch(m, lengths) for m in mine], finish, lambda n, m, g: sums.put(n, mine[m], g))
    total = sums.total()
    runs = {run: shards.read(total, run) for run in shards.own}
    norm = global_norm(runs, shards, {n: part.cut(n) for n in part.names}, part.names, mesh, ops)
    shards.collect(total)
    return total, norm, objectives


def whole(results: list[Any], config: ModelConfig, shape: MeshShape) -> dict[str, Tensor]:
    """The whole gradient from every rank's, what is not cut being the same everywhere."""
    parts: dict[str, dict[int, Tensor]] = {}
    for rank, (total, _, _) in enumerate(results):
        for name, tensor in total.items():
            at = shape.place(rank)["tp"]
            if at in parts.setdefault(name, {}):
                assert torch.equal(parts[name][at], tensor), name
            parts[name][at] = tensor
    found = {}
    for name, slices in parts.items():
        module = name.rpartition(".")[0]
        cut = {"q": 0, "k": 0, "v": 0, "gate": 0, "up": 0, "embed": 0, "output": 0, "o": 1, "down": 1}
        dim = cut.get(module.rpartition(".")[2])
        ordered = [slices[i] for i in range(shape.tp)]
        if dim is None:
            assert all(torch.equal(ordered[0], other) for other in ordered), name
        found[name] = ordered[0] if dim is None else torch.cat(ordered, dim)
    return found


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [(torch.bfloat16, False), (torch.float32, False), (torch.bfloat16, True)],
    ids=["bf16", "fp32", "sequence parallel"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_degree_gives_the_same_bytes(threads: Threads, family: str, dtype: torch.dtype, rows: bool) -> None:
    """No degree divides the rows."""
    config = model(family)
    results = {}
    for tp in (1, 2, 4):
        shape = MeshShape(tp=tp)
        found = threads(shape, functools.partial(trained, config=config, count=2, dtype=dtype, rows=rows))
        assert len({(norm, *objectives) for _, norm, objectives in found}) == 1
        results[tp] = whole(found, config, shape), found[0][1:]
    for tp in (2, 4):
        same(results[1][0], results[tp][0])
        assert results[1][1] == results[tp][1]


@pytest.mark.parametrize(
    ("name", "rows"), [("1f1b", False), ("zb-h1", False), ("zb-v", False), ("zb-h1", True), ("zb-v", True)]
)
def test_with_pipelines_and_replicas(threads: Threads, name: str, rows: bool) -> None:
    config = model("qwen3", canonical_tp=2, num_layers=4)
    work = functools.partial(trained, config=config, count=5, dtype=torch.bfloat16)
    alone = threads(MeshShape(), work)
    shape = MeshShape(pp=2, dp=2, tp=2)
    found = threads(shape, functools.partial(work, name=name, rows=rows))
    same(whole(alone, config, MeshShape()), whole(found, config, shape))
    assert {norm for _, norm, _ in found} == {alone[0][1]}


@pytest.mark.parametrize("family", FAMILIES)
def test_contexts_give_the_same_bytes(threads: Threads, family: str) -> None:
    check_contexts(threads, family)


def check_contexts(threads: Threads, family: str, lengths: Sequence[int] = LENGTHS) -> None:
    """Of rows of some sequences, which ranks share out anywhere or, in a class that takes some together, as those."""
    config = model(family, canonical_tp=2)
    work = functools.partial(trained, config=config, count=2, dtype=torch.bfloat16, lengths=lengths)
    alone = threads(MeshShape(), work)
    for shape in (MeshShape(cp=4), MeshShape(cp=2, tp=2)):
        found = threads(shape, work)
        same(whole(alone, config, MeshShape()), whole(found, config, shape))
        assert {(norm, *objectives) for _, norm, objectives in found} == {(alone[0][1], *alone[0][2])}


def test_segments_change_rounding_only(threads: Threads) -> None:
    """In float32: relative 1e-5 of the largest element, as sums of 64 terms are merely made in another order."""
    one, four = (
        threads(MeshShape(), functools.partial(trained, config=model(canonical_tp=n), count=2, dtype=torch.float32))
        for n in (1, 4)
    )
    differing = 0
    for name, tensor in one[0][0].items():
        torch.testing.assert_close(tensor, four[0][0][name], rtol=1e-4, atol=1e-5 * float(tensor.abs().max()))
        differing += not torch.equal(tensor, four[0][0][name])
    assert differing > 0, "segments that change nothing are not made"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_sums_over_segments_by_the_tree(dtype: torch.dtype) -> None:
    """The definition, written out, forward and backward."""
    x, weight = torch.randn(7, 64).to(dtype).requires_grad_(), torch.randn(48, 64, requires_grad=True)
    cut = cut_operators(BITWISE, 4, 4, alone).cut
    p = [BITWISE.linear(a, w, None, torch.float32) for a, w in zip(x.split(16, 1), weight.split(16, 1), strict=True)]
    y = cut["rows"].linear(x, weight)
    assert torch.equal(y, ((p[0] + p[1]) + (p[2] + p[3])).to(dtype))
    y = cut["columns"].linear(x, weight)
    assert torch.equal(y, BITWISE.linear(x, weight))
    dy = torch.randn(7, 48).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    parts = zip(dy.split(12, 1), weight.split(12, 0), strict=True)
    g = [input_gradient(d.contiguous(), w, torch.float32) for d, w in parts]
    assert torch.equal(dx, ((g[0] + g[1]) + (g[2] + g[3])).to(dtype))


def test_a_deferred_weight_gradient_is_the_operators_own() -> None:
    x, weight = torch.randn(9, 32), torch.randn(16, 32, requires_grad=True)
    bias = torch.randn(16, requires_grad=True)
    dy = torch.randn(9, 16)
    for ops in (BITWISE, operators("fast")):
        now = torch.autograd.grad(ops.linear(x, weight, bias), (weight, bias), dy)
        queue = WeightQueue()
        deferred = deferring(ops, queue)
        y = deferred.linear(x, weight, bias)
        y.backward(dy)
        assert weight.grad is None
        (due,) = queue.take()
        assert due.weight is weight
        assert torch.equal(due.gradient(), now[0])
        assert torch.equal(bias.grad, now[1])
        bias.grad = None
        assert not queue.take()


def test_serving_gives_the_bits_of_training_on_any_degree(threads: Threads) -> None:
    """Packed weights and pages: prefill and decode on two ranks, against the training forward of one."""
    config = model("qwen3", canonical_tp=2)
    tokens, _ = batch(0)
    one = random_decoder(config, 1)
    expected = one(cut_operators(BITWISE, 2, 2, alone), tokens, Packed.of([sum(LENGTHS)]), dtype=torch.bfloat16)

    def served(mesh: Mesh) -> Tensor:
        table = schedule("1f1b", 1, 1)
        part = Partition(config, mesh, table, stages_of(2, table, True))
        ops, decoder = part.operators(BITWISE), part.decoder(lambda name, shape: draw(name, shape, config, 1))
        with torch.no_grad():
            decoder.prepare(ops, torch.bfloat16)
            pages = [KVPages.zeros(1, part.local.num_kv_heads, 16, torch.bfloat16) for _ in range(2)]
            found = []
            for first, end in ((0, 18), (18, 19), (19, 20), (20, sum(LENGTHS))):
                found.append(decoder(ops, tokens[first:end], _paged(first, end), pages, torch.bfloat16))
        return torch.cat(found)

    for degree in (1, 2):
        for found in threads(MeshShape(tp=degree), served):
            assert torch.equal(found, expected)


def _paged(first: int, end: int) -> Paged:
    return Paged(
        torch.arange(first, end, dtype=torch.int32),
        torch.tensor([0, end - first], dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
    )


def test_what_does_not_divide_is_told() -> None:
    for wrong in (3, 8):
        with pytest.raises(LockstepError, match=rf"canonical_tp {wrong} must be a power of two that divides num_kv_h"):
            check(ModelConfig, {**BASE, "canonical_tp": wrong}, "test")
    with pytest.raises(LockstepError, match="canonical_tp 4 is more than the vocabulary's 3 tokens"):
        check(ModelConfig, {**BASE, "canonical_tp": 4, "vocab_size": 3}, "test")
    assert isinstance(Decoder(model()), Decoder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_over_ranks_is_the_tree_however_it_travels(threads: Threads, ranks: int, dtype: torch.dtype) -> None:
    """Small tensors by doubling, large ones in parts, also when the parts are not equal; and what that moves."""
    for rows in (3, 401):  # 3 and 401 rows of 91 float32: below and above the size from which parts pay
        values = [torch.randn(rows, 91, generator=torch.Generator().manual_seed(i)) for i in range(ranks)]
        low = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
        expected = (low[0] if ranks == 2 else low[0] + low[1]).to(dtype)

        def work(mesh: Mesh, values: list[Tensor] = values) -> tuple[Tensor, int]:
            total = mesh["tp"].add(values[mesh.rank], dtype)
            return total, mesh.take_traffic()["tp"].bytes

        found = threads(MeshShape(tp=ranks), work)
        assert all(torch.equal(total, expected) for total, _ in found)
        size = values[0].nbytes
        parts = (ranks - 1) / ranks * (size + expected.nbytes)
        doubling = size * (ranks.bit_length() - 1)
        wanted = min(parts, doubling) if rows > 100 else doubling
        assert all(sent == pytest.approx(wanted, rel=0.01) for _, sent in found)
