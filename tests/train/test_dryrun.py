"""The dry-run against what a step that is really run allocates, and against counts that can be made by hand."""

import gc
import subprocess
import sys

import pytest
import torch
from tests.ranks_as_threads import on_threads
from tests.train.allocated import most_allocated
from torch.profiler import ProfilerActivity, profile

from lockstep.cli.app import run
from lockstep.config import Config, ModelConfig
from lockstep.errors import LockstepError
from lockstep.model import Model, random_decoder
from lockstep.model.init import draw
from lockstep.ops import Packed, operators
from lockstep.parallel.mesh import MeshShape
from lockstep.plan import Batch as PlanBatch
from lockstep.plan import Layout, ModelShape, Plan, predict
from lockstep.train.data import Batch
from lockstep.train.dryrun import dry_run
from lockstep.train.layout import partition
from lockstep.train.mesh_engine import OnMesh
from lockstep.train.optimizer import AdamW
from lockstep.train.step import Compute, step_gradient
from lockstep.train.tree import global_norm

WIDE = ModelConfig(
    vocab_size=512, hidden_size=256, intermediate_size=704, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64,
    max_positions=256,
)  # fmt: skip
DEEP = WIDE.model_copy(update={"num_layers": 8, "hidden_size": 64, "intermediate_size": 192, "head_dim": 16})
TIED = WIDE.model_copy(update={"vocab_size": 16384, "tie_embeddings": True, "qk_norm": True, "family": "qwen3"})


def measured_peak(config: Config, shape: ModelConfig) -> int:
    """Bytes that PyTorch's allocator has given out at the worst moment of a step, the weights included."""
    train, ops = config.train, operators("bitwise")
    random_decoder(shape, 0)  # what is made once for all, before it counts
    gc.collect()  # what earlier tests left must not be freed while it counts
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        decoder = random_decoder(shape, 0)
        parameters = dict(decoder.named_parameters())
        optimizer = AdamW(parameters, config.optimizer, ops)
        count = train.micro_batch * config.data.seq_len
        batches = [
            Batch(torch.ones(count, dtype=torch.int64), torch.ones(count, dtype=torch.int64), packed)
            for packed in [Packed.of([config.data.seq_len] * train.micro_batch)] * train.micro_batches
        ]
        found = step_gradient(decoder, Compute(ops, getattr(torch, train.dtype)), parameters, batches, 0.0)
        assert found is not None
        optimizer.step(found.gradient, 1e-3, global_norm(found.gradient, ops))
    return most_allocated(run)


def config(**train) -> Config:
    return Config.model_validate({"data": {"seq_len": 256}, "train": train})


@pytest.mark.parametrize(
    ("shape", "train"),
    [
        (WIDE, {"micro_batch": 4, "micro_batches": 1}),
        (DEEP, {"micro_batch": 2, "micro_batches": 3, "dtype": "float32"}),
        (TIED, {"micro_batch": 1, "micro_batches": 2}),
    ],
    ids=["wide", "deep", "tied"],
)
def test_peak_within_five_per_cent_of_the_measured_one(shape, train):
    found, real = dry_run(config(**train), shape), measured_peak(config(**train), shape)
    assert found.peak.bytes == pytest.approx(real, rel=0.05)
    assert sum(found.peak.kinds.values()) == found.peak.bytes


def test_counts_of_a_step():
    found = dry_run(config(micro_batch=2, micro_batches=2, dtype="float32"), WIDE)
    body = 2 * (256 * 64 * (4 + 2 + 2 + 4) + 3 * 256 * 704)  # layers x (query, key, value, output; gate, up, down)
    assert found.parameters == body + 2 * 512 * 256 + 5 * 256
    assert found.weights == 4 * found.parameters == found.optimizer // 2 == found.peak.kinds["weights"]
    tokens = 2 * 2 * 256
    assert found.operators["lockstep::gemm"].flops == 2 * 2 * tokens * body  # forward, gradient of the input
    assert found.operators["lockstep::gemm_transposed"].flops == 2 * tokens * body
    assert found.operators["lockstep::attention_packed"].calls == 2 * 2
    assert found.operators["lockstep::adamw"].calls == 3 + 2 * 9
    assert max(found.history) == found.peak.bytes


def test_weights_are_never_allocated():
    shape = WIDE.model_copy(update={"num_layers": 1, "intermediate_size": 1 << 34})  # 13 x 2^40 weights
    found = dry_run(config(micro_batch=1, micro_batches=1), shape)
    assert found.peak.bytes > 16 * 3 * 256 << 34
    assert "backward of micro-batch 1" in found.peak.where


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": {"seq_len": 512}}, "longer than the model's max_positions 256"),
        ({"lora": {"rank": 4}}, "set lora.rank to 0"),
        ({"train": {"numerics": "fast"}}, "Set train.numerics to bitwise"),
    ],
)
def test_what_it_does_not_run_is_refused(changes, said):
    with pytest.raises(LockstepError, match=said):
        dry_run(Config.model_validate({"data": {"seq_len": 256}, **changes}), WIDE)


def test_command(capsys):
    assert run(["dryrun", "llama3-1b", "--set", "train.micro_batches=1", "--set", "train.micro_batch=1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1.236 B parameters")
    assert "lockstep::attention_backward" in out
    assert run(["dryrun", "llama3-9b"]) == 2
    assert "llama3-8b" in capsys.readouterr().err


@pytest.mark.slow
def test_seventy_billion_parameters_in_thirty_seconds_and_two_gigabytes():
    """`pytest -m slow tests/train/test_dryrun.py`, on a machine that does nothing else: 15 s on two cores."""
    command = [sys.executable, "-m", "lockstep", "dryrun", "llama3-70b", "--set", "data.seq_len=8192"]
    measured = [sys.executable, "-c", MEASURED, *command, "--set", "train.micro_batch=1"]
    told, seconds, kilobytes = subprocess.run(measured, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told.startswith("70.55 B parameters")
    assert float(seconds) < 30
    assert int(kilobytes) < 2_000_000


MEASURED = """
import resource, subprocess, sys, time
begun = time.perf_counter()
print(subprocess.run(sys.argv[1:], capture_output=True, text=True, check=True).stdout.splitlines()[0])
print(time.perf_counter() - begun)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
NARROW = {"num_layers": 4, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_heads": 2}


def real_traffic(config: Config, shape: ModelConfig) -> list[dict]:
    """What every rank sends in a step that is really run at O0, the ranks being threads."""
    count = config.data.seq_len * config.train.micro_batch

    def work(mesh):
        part = partition(config, shape, mesh)
        decoder = part.decoder(lambda name, size: draw(name, size, shape, 0))
        parameters = {name: p for name, p in decoder.named_parameters() if not p.is_meta}
        engine = OnMesh(mesh, part, Model(decoder, None, operators("bitwise"), torch.float32), parameters, config)
        tokens = torch.arange(count) % shape.vocab_size
        packed = Packed.of([config.data.seq_len] * config.train.micro_batch)
        found = engine.gradient([Batch(tokens, tokens, packed)] * config.train.micro_batches, 0.0, lambda: False)
        engine.norm(found)
        engine.update(found, 1e-3, 1.0)
        return mesh.take_traffic()

    return on_threads(MeshShape.of(config.parallel), work)


@pytest.mark.parametrize(
    "parallel",
    [
        {"dp": 2, "fsdp": 1},
        {"pp": 2, "schedule": "zb-h1"},
        {"pp": 2, "dp": 2, "schedule": "zb-v", "recompute": "full"},
    ],
    ids=str,
)
def test_every_rank_sends_what_it_really_sends(parallel):
    shape = WIDE.model_copy(update=NARROW | {"tie_embeddings": True})
    asked = Config.model_validate(
        {
            "data": {"seq_len": 32}, "train": {"micro_batch": 1, "micro_batches": 8}, "parallel": parallel,
            "compile": {"level": "O0"},
        }
    )  # fmt: skip
    found = [dry_run(asked, shape, rank).traffic for rank in range(MeshShape.of(asked.parallel).size)]
    assert found == real_traffic(asked, shape)


def test_a_plan_from_its_file(tmp_path, capsys):
    shape = ModelShape("tiny", 4, 32, 2, 512, intermediate=48, kv_heads=2, head_dim=16, gated=True, tied=False)
    layout = Layout(pp=2, dp=2, schedule="zb-h1", fsdp=1)
    batch = PlanBatch(16, 32)
    Plan(shape, "4xH100", batch, layout, predict(shape, layout, "4xH100", batch)).save(tmp_path / "plan.yaml")
    assert run(["dryrun", "--plan", str(tmp_path / "plan.yaml"), "--rank", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rank 3 of pp2 dp2: ")
    assert "step of 8 micro-batches of 32 tokens" in out
    assert "sends            pp" in out
    lines = out.splitlines()
    (compiled,) = (line for line in lines if line.startswith("O2  "))
    assert "calls: forward " in compiled
    assert "weight gradients " in compiled  # ZB-H1 puts them off
    assert sum("micro-batches in flight" in line for line in lines) == 2
    assert run(["dryrun", "--plan", str(tmp_path / "plan.yaml"), "--rank", "4"]) == 2
    assert "rank 4 is not in the mesh: it has ranks 0 to 3" in capsys.readouterr().err
