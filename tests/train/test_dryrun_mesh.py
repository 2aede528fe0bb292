"""The dry-run of a mesh's rank against the allocations of that rank, really run with peers who send nothing."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.allocated import most_allocated
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lockstep.config import Config, ModelConfig
from lockstep.model import Model
from lockstep.model.init import draw
from lockstep.ops import Packed, operators
from lockstep.parallel.collectives import Mesh, Traffic
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.transport import Pending
from lockstep.train.data import Batch
from lockstep.train.dryrun import dry_run
from lockstep.train.layout import partition
from lockstep.train.level_report import level_reports, levels_text
from lockstep.train.mesh_engine import OnMesh

SHAPE = ModelConfig(
    vocab_size=2048, hidden_size=256, intermediate_size=704, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64,
    max_positions=256, canonical_tp=2, tie_embeddings=False,
)  # fmt: skip


class _Begun:
    """A message on its way keeps its tensor, as `torch.distributed` does."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def wait(self) -> None:
        self._tensor = None


class _Silent:
    """A transport to ranks that are not there: what they would send is zeros."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def send(self, tensor: Tensor, to: int) -> Pending:
        return _Begun(tensor)

    def receive(self, out: Tensor, source: int) -> Pending:
        out.zero_()
        return _Begun(out)


def measured_peak(config: Config, rank: int) -> int:
    """Bytes that PyTorch's allocator has given out at the worst moment of a step, the weights included."""
    train, asked = config.train, MeshShape.of(config.parallel)
    tokens = torch.arange(config.data.seq_len * train.micro_batch) % SHAPE.vocab_size
    batch = Batch(tokens, tokens.clone(), Packed.of([config.data.seq_len] * train.micro_batch))
    gc.collect()  # what earlier tests left must not be freed while it counts
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        mesh = Mesh(asked, _Silent(rank, asked.size))
        part = partition(config, SHAPE, mesh)
        assert part is not None
        decoder = part.decoder(lambda name, size: draw(name, size, SHAPE, 0))
        parameters = {name: p for name, p in decoder.named_parameters() if not p.is_meta}
        model = Model(decoder, None, part.operators(operators("bitwise")), torch.bfloat16)
        engine = OnMesh(mesh, part, model, parameters, config)
        found = engine.gradient([batch] * train.micro_batches, 0.0, lambda: False)
        engine.update(found, 1e-3, 1.0 / max(engine.norm(found), 1.0))
    return most_allocated(run)


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "sequence_parallel": True},
    {"cp": 2},
    {"dp": 4, "fsdp": 2},
    {"dp": 4, "fsdp": 3},
    {"pp": 2, "dp": 2, "fsdp": 3, "schedule": "zb-h1"},
    {"dp": 4, "fsdp": 3, "recompute_layers": 1, "offload_layers": 3},
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_peak_within_five_per_cent_of_the_measured_one(parallel: dict[str, Any], tmp_path: Path) -> None:
    parallel = {**parallel, "offload_dir": str(tmp_path)}
    rank = MeshShape.of(Config.model_validate({"parallel": parallel}).parallel).size - 1
    config = Config.model_validate({
        "data": {"seq_len": 256}, "train": {"micro_batch": 8, "micro_batches": 4}, "parallel": parallel,
        "compile": {"level": "O0"},
    })  # fmt: skip
    found = dry_run(config, SHAPE, rank)
    assert found.peak.bytes == pytest.approx(measured_peak(config, rank), rel=0.05)


def test_smaller_buckets_of_gradients_are_more_messages_of_the_same_bytes() -> None:
    """Of 16 MB the half that the other rank owns goes as one message, or as several of one or two matrices each."""

    def sent(**parallel: Any) -> Traffic:
        tree = {"data": {"seq_len": 64}, "train": {"micro_batches": 2}, "parallel": {"dp": 2, **parallel}}
        return dry_run(Config.model_validate(tree), SHAPE).traffic["dp"]

    one, many = sent(), sent(bucket_mb=1)
    assert many.bytes == one.bytes
    assert many.calls > one.calls + 3


def test_what_is_shared_out_takes_less() -> None:
    """Each level and the shared rows against the layout without them: by what they must save at least."""

    def peak(micro_batch: int, count: int, **parallel: Any) -> int:
        train = {"micro_batch": micro_batch, "micro_batches": count}
        tree = {"data": {"seq_len": 256}, "train": train, "parallel": parallel}
        return dry_run(Config.model_validate(tree), SHAPE).peak.bytes

    rows = 8 * 256
    kept = 4 * (2 * rows * 256 * 4 + 2 * rows * 256 * 2)  # of every layer two sums and two norms' results
    assert peak(8, 1, tp=2) - peak(8, 1, tp=2, sequence_parallel=True) > 0.45 * kept
    levels = [peak(1, 8, dp=4, fsdp=level) for level in range(4)]
    weights = 4 * dry_run(Config.model_validate({"data": {"seq_len": 256}}), SHAPE).parameters
    assert levels[0] - levels[1] > 0.7 * 2 * weights  # three quarters of the moments
    assert levels[1] - levels[2] > 0.7 * weights  # of the sums of gradients; but one layer's travel
    assert levels[2] - levels[3] > 0.15 * weights  # of the weights; but a layer's and the head's are gathered


def test_what_experts_keep_beside_programs_is_told() -> None:
    tree = SHAPE.model_dump() | {"canonical_tp": 1, "num_experts": 4, "experts_per_token": 2}
    asked = {"data": {"seq_len": 256}, "train": {"micro_batches": 2}, "parallel": {"dp": 2, "ep": 2}}
    reports = level_reports(Config.model_validate(asked), ModelConfig.model_validate(tree), 0, ["O1", "O2"])
    assert not [one.reason for one in reports if one.reason]
    assert "of experts' rows, if all are chosen alike, kept by each of" in levels_text(reports)
