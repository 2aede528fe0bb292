"""Pipelines of every kind of block: experts, latent attention, sliding windows, norms behind the branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.model.tiny import CONFIGS
from torch import Tensor

from lockstep.memory.layers import recomputing
from lockstep.model.hf_config import read_config
from lockstep.model.init import draw, random_decoder
from lockstep.ops import Packed, operators
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.partition import Partition
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.schedules import schedule
from lockstep.parallel.stages import stages_of
from lockstep.parallel.tree import NodeTree
from lockstep.train.data import Batch
from lockstep.train.step import Compute, shares, step_gradient, token_weight

Threads = Callable[[MeshShape, Callable[[Mesh], Any]], list[Any]]


def batches() -> list[Batch]:
    found = []
    for i in range(3):
        tokens = torch.randint(0, 96, (20,), generator=torch.Generator().manual_seed(i))
        found.append(Batch(tokens[:-1], tokens[1:], Packed.of([12, 7])))
    return found


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gemma3"])
def test_a_split_backward_gives_the_bytes_of_one_process(threads: Threads, family: str) -> None:
    """ZB-H1: weight gradients of products that wait, and of those that do not (experts, parts of a weight)."""
    config = read_config(CONFIGS[family]().to_dict(), family).model_copy(update={"router_aux_loss": 0.0})
    compute = Compute(operators("bitwise"), torch.bfloat16)
    alone = random_decoder(config, 1)
    trained = {name: p for name, p in alone.named_parameters() if p.requires_grad}
    expected = step_gradient(alone, compute, trained, batches(), 0.0)

    def work(mesh: Mesh) -> dict[str, Tensor]:
        table = schedule("zb-h1", 2, 3)
        part = Partition(config, mesh, table, stages_of(config.num_layers, table, config.tie_embeddings))
        decoder = part.decoder(lambda name, shape: draw(name, shape, config, 1))
        parameters = {n: p for n, p in decoder.named_parameters() if n in part.used(part.names)}
        line = Pipeline(
            mesh["pp"], table, part.stages, decoder, compute.ops, compute.dtype, parameters, recomputing([0])
        )
        trees = {n: NodeTree(3) for n in part.owned(part.names)}

        def finish(m: int, hidden: Tensor) -> Tensor:
            return shares(decoder, compute, hidden, batches()[m], token_weight(batches()), 0.0)[0]

        line.step(batches(), finish, lambda n, m, g: trees[n].put(m, g))
        return {n: tree.total() for n, tree in trees.items()}

    found = {name: tensor for part in threads(MeshShape(pp=2), work) for name, tensor in part.items()}
    assert found.keys() == trained.keys()
    for name, gradient in zip(trained, expected.gradient, strict=True):
        assert torch.equal(found[name], gradient), name
