"""Whole runs on a mesh: the bytes of one process on every layout, resumed on any other, and what goes wrong."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.processes import start
from tests.ranks_as_threads import on_threads
from tiny_run import tiny_tree, with_experts
from torch import Tensor

from lockstep.config import Config
from lockstep.config.check import check
from lockstep.errors import LockstepError
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.join import joined
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.schedules import Table, schedule
from lockstep.train import Trainer, speed
from lockstep.train.checkpoint import checkpoints, load_checkpoint
from lockstep.train.measure import measure_layouts, take_turns
from lockstep.train.metrics import read_metrics

Tiny = Callable[..., Config]

TRAIN = {"steps": 4, "micro_batches": 5, "save_every": 2, "eval_every": 2, "keep_last": 9}
MODEL = {"num_layers": 4}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "matrix_peak", lambda dtype: 1e11)


def layout(parallel: dict[str, Any]) -> MeshShape:
    return MeshShape(**{k: v for k, v in parallel.items() if k in ("pp", "dp", "cp", "tp", "ep")})


def run(config: Config, parallel: dict[str, Any], resume: Path | None = None) -> None:
    """Train to the end, the ranks being threads, operator by operator: of levels `test_mesh_levels` tells."""

    def work(mesh: Mesh) -> None:
        Trainer(config, resume=resume, mesh=mesh, parallel=parallel, compile={"level": "O0"}).fit()

    on_threads(layout(parallel), work)


def content(out: Path) -> dict[str, dict[str, Tensor]]:
    """The tensors of every checkpoint."""
    found = {}
    for path in checkpoints(out):
        point = load_checkpoint(path)
        found[path.name] = {**point.tensors("model"), **point.tensors("optimizer")}
    return found


def same(a: Path, b: Path, names: list[str] | None = None) -> None:
    left, right = content(a), content(b)
    for step in names or sorted(left):
        assert left[step].keys() == right[step].keys()
        for name, tensor in left[step].items():
            assert torch.equal(tensor, right[step][name]), (step, name)


def losses(out: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "loss", "objective", "grad_norm", "eval_loss")
    return [tuple(line.get(key) for key in keys) for line in read_metrics(out)]


LAYOUTS = {
    "dp2": {"dp": 2},
    "dp3, moments sharded": {"dp": 3, "fsdp": 1},
    "pp2 1f1b": {"pp": 2, "recompute_layers": 1},
    "pp2 zb-v": {"pp": 2, "schedule": "zb-v", "layers_per_stage": [2, 2], "offload_per_stage": [1, 2]},
    "pp2 dp2, moments sharded": {"pp": 2, "dp": 2, "fsdp": 1, "schedule": "zb-h1", "recompute": "full"},
    "one process that recomputes and offloads": {"recompute_layers": 1, "offload_layers": 2},
    "tp2": {"tp": 2},
    "tp2 pp2 dp2, moments sharded": {"tp": 2, "pp": 2, "dp": 2, "fsdp": 1, "schedule": "zb-v"},
    "dp2 of two segments, moments sharded": {"dp": 2, "fsdp": 1},
    "tp2 pp2 1f1b, rows shared": {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute_layers": 1},
    "dp2, gradients sharded": {"dp": 2, "fsdp": 2},
    "dp3, weights sharded": {"dp": 3, "fsdp": 3},
    "pp2 dp2 zb-v, gradients sharded": {"pp": 2, "dp": 2, "fsdp": 2, "schedule": "zb-v", "offload_layers": 1},
    "pp2 dp2 1f1b, weights sharded": {"pp": 2, "dp": 2, "fsdp": 3, "recompute_per_stage": [1, 0], "offload_layers": 1},
    "cp2": {"cp": 2},
    "cp2 pp2 zb-h1, weights sharded by dp2": {"cp": 2, "pp": 2, "dp": 2, "fsdp": 3, "schedule": "zb-h1"},
    "cp2 tp2": {"cp": 2, "tp": 2, "recompute_layers": 1, "offload_layers": 3},
    "tp2 dp2, rows and weights shared": {"tp": 2, "dp": 2, "fsdp": 3, "sequence_parallel": True, "offload_layers": 4},
}
ONE_BY_ONE = ("dp2", "dp3, moments sharded", "pp2 1f1b", "tp2", "cp2", "dp3, weights sharded")
"""Those with every micro-batch as a canonical group; the others have two groups of three."""


Alone = Callable[[dict[str, Any], dict[str, Any]], Path]


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The run of one process of a model and a train section: made once for all layouts that are compared with it."""
    made: dict[str, Path] = {}

    def find(model: dict[str, Any], train: dict[str, Any]) -> Path:
        key = json.dumps([model, train])
        if key not in made:
            made[key] = tmp_path_factory.mktemp("alone") / "run"
            tree = tiny_tree(text, made[key], model=model, train=train, compile={"level": "O0"})
            Trainer(check(Config, tree, "test")).fit()
        return made[key]

    return find


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_the_run_of_one_process(tiny: Tiny, tmp_path: Path, alone: Alone, name: str) -> None:
    """Losses, norms, evaluations, and every checkpoint's weights and moments."""
    segments = 2 if "tp" in LAYOUTS[name] or "segments" in name else None
    tied = name not in ("dp2", "dp3, weights sharded")
    model = {**MODEL, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "tie_embeddings": tied}
    train = {**TRAIN, "steps": 2, "save_every": 1, "canonical_tp": segments}
    if name not in ONE_BY_ONE:
        train |= {"micro_batches": 6, "gradient_groups": 2}
    if LAYOUTS[name].get("fsdp", 0) > 1:
        train["micro_batches"] = 6
        model["vocab_size"] = 5000  # an embedding of three blocks: runs begin within a tensor
    expected = alone(model, train)
    run(tiny(tmp_path / "mesh", model=model, train=train), LAYOUTS[name])
    same(expected, tmp_path / "mesh")
    assert losses(expected) == losses(tmp_path / "mesh")


EXPERT_LAYOUTS = {
    "ep2 dp2": {"dp": 2, "ep": 2, "recompute_layers": 1},
    "ep2 dp4, moments sharded": {"dp": 4, "ep": 2, "fsdp": 1},
    "ep3 dp3, gradients sharded": {"dp": 3, "ep": 3, "fsdp": 2},
    "ep2 dp4, weights sharded, shared experts, latent attention": {"dp": 4, "ep": 2, "fsdp": 3},
    "ep2 dp2 pp2 zb-h1, shared experts, latent attention": {"pp": 2, "dp": 2, "ep": 2, "schedule": "zb-h1"},
    "ep2 dp2 pp2 zb-v, gradients sharded": {"pp": 2, "dp": 2, "ep": 2, "fsdp": 2, "schedule": "zb-v"},
}


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_experts_on_several_ranks_give_the_run_of_one_process(
    tiny: Tiny, tmp_path: Path, alone: Alone, name: str
) -> None:
    train = {**TRAIN, "steps": 2, "save_every": 1, "micro_batches": 12, "micro_batch": 1}
    latent = "latent" in name
    if latent or "sharded" in name:
        train["gradient_groups"] = 4
    model = {**with_experts("deepseek_v3"), "mla_form": "absorbed"} if latent else with_experts("qwen3_moe")
    expected = alone(model, train)
    run(tiny(tmp_path / "mesh", model=model, train=train), EXPERT_LAYOUTS[name])
    same(expected, tmp_path / "mesh")
    assert losses(expected) == losses(tmp_path / "mesh")


MOVES: dict[str, tuple[dict[str, Any], ...]] = {
    "two processes, a pipeline, one process": ({"dp": 2, "fsdp": 1}, {"pp": 2, "schedule": "v-half"}, {}),
    "weights sharded, tensor parallel, gradients sharded":
        ({"dp": 2, "fsdp": 3}, {"tp": 2, "sequence_parallel": True}, {"dp": 3, "fsdp": 2}),
    "experts on two ranks, on three, in a pipeline":
        ({"dp": 2, "ep": 2, "fsdp": 3}, {"dp": 3, "ep": 3, "fsdp": 1}, {"pp": 2}),
}  # fmt: skip


@pytest.mark.parametrize("moves", MOVES)
def test_a_run_goes_on_upon_another_layout(tiny: Tiny, tmp_path: Path, moves: str) -> None:
    """The weights of a run that was never stopped."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    segments = 2 if any("tp" in parallel for parallel in MOVES[moves]) else None
    train = {**TRAIN, "steps": 6, "micro_batches": 6, "canonical_tp": segments}
    if segments:  # two replicas and three, of two groups
        train["gradient_groups"] = 2
    model = with_experts("qwen3_moe") if "experts" in moves else {**MODEL, "num_kv_heads": 2}
    Trainer(tiny(whole, model=model, train=train)).fit()
    config = tiny(moved, model=model, train=train)
    for steps, parallel in zip((2, 4, 6), MOVES[moves], strict=True):
        part = config.model_copy(update={"train": config.train.model_copy(update={"save_every": 2})})
        halted = _Halted(steps)
        on_threads(
            layout(parallel),
            lambda mesh, halted=halted, part=part, parallel=parallel: halted.fit(
                Trainer(part, resume=moved if checkpoints(moved) else None, mesh=mesh, parallel=parallel)
            ),
        )
    same(whole, moved, ["step-00000006"])


class _Halted:
    """Stops a trainer after so many steps, as a signal does, by asking one rank only."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def fit(self, trainer: Trainer) -> None:
        engine = trainer.run.engine
        real = engine.stopping

        def stopping(stop: Any) -> bool:
            if trainer.run.mesh.rank == trainer.run.mesh.shape.size - 1 and self.reached(trainer):
                stop.signal = "SIGTERM"
            return real(stop)

        engine.stopping = stopping
        self.done = 0
        trainer.fit()

    def reached(self, trainer: Trainer) -> bool:
        at = trainer.position.step + self.done >= self.steps < trainer.config.train.steps
        self.done += 1
        return at


def test_metrics_tell_each_ranks_memory_and_each_axis_bytes(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny(model=MODEL, train={**TRAIN, "steps": 2}), {"pp": 2, "dp": 2})
    line = next(line for line in read_metrics(tmp_path / "run") if "loss" in line)
    assert len(line["peak_memory"]) == 4
    assert min(line["peak_memory"]) > 10e6
    assert line["step_s"] > 0
    assert line["sent_bytes"].keys() >= {"pp", "dp"}
    # Of every micro-batch (2 x 32 tokens of 32 float32) an activation, a gradient and rows of the tied embedding.
    assert line["sent_bytes"]["pp"] > 5 * 2 * 2 * 32 * 32 * 4 * 0.9


def test_a_table_from_a_file_is_executed(tiny: Tiny, tmp_path: Path) -> None:
    """Any valid table: here one whose gradients come from the last micro-batch to the first; sums keep their order."""
    train = {**TRAIN, "micro_batches": 6, "gradient_groups": 2}
    made = schedule("gpipe", 2, 6)
    rows = tuple((*row[:6], *row[:5:-1]) for row in made.rows)
    Table("mine", 2, 6, made.chunks, made.placement, rows).save(tmp_path / "mine.yaml")
    Trainer(tiny(tmp_path / "alone", model=MODEL, train=train)).fit()
    run(tiny(tmp_path / "mesh", model=MODEL, train=train), {"pp": 2, "schedule": str(tmp_path / "mine.yaml")})
    same(tmp_path / "alone", tmp_path / "mesh", ["step-00000004"])
    schedule("zb-h1", 2, 4).save(tmp_path / "other.yaml")
    other = functools.partial(
        _refused_on, tiny(train=TRAIN), {"pp": 2, "schedule": str(tmp_path / "other.yaml")}, "has 2 stages and 4 micro"
    )
    on_threads(MeshShape(pp=2), other)


def test_a_wrong_number_of_processes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun started is not what the configuration asks for."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(LockstepError, match=r"= 2 ranks, but 3 processes were started: .* so that the product is 3"), \
            joined(MeshShape(dp=2)):  # fmt: skip
        pass


def test_a_pipeline_saves_what_no_gradient_trains(tiny: Tiny, tmp_path: Path) -> None:
    """The bias of an expert choice lies on each layer's own stage; a checkpoint has all of them."""
    train = {"steps": 2, "micro_batches": 2}
    for name, parallel in (("alone", {}), ("mesh", {"pp": 2})):
        run(tiny(tmp_path / name, model=with_experts("deepseek_v3"), train=train), parallel)
    same(tmp_path / "alone", tmp_path / "mesh")
    assert any("bias" in name for name in content(tmp_path / "mesh")["step-00000002"])


def test_layouts_are_measured_in_turns(tiny: Tiny) -> None:
    layouts: list[dict[str, Any]] = [
        {"parallel": {"dp": 2}},
        {"parallel": {"pp": 2, "schedule": "zb-v"}},
        {"parallel": {"tp": 2}, "train": {"canonical_tp": 2, "micro_batch": 5, "micro_batches": 1}},
    ]
    config = tiny(model={**MODEL, "num_kv_heads": 2}, train={"micro_batches": 5})
    measured = on_threads(MeshShape(dp=2), lambda mesh: take_turns(config, layouts, mesh.transport, 2, 2, 1))
    assert measured[0] == measured[1]
    assert [found.sections for found in measured[0]] == layouts
    assert [len(found.seconds) for found in measured[0]] == [4, 4, 4]
    assert all(0 < found.step_s < 60 and min(found.peak_memory) > 1e7 for found in measured[0])
    assert [next(iter(found.sent_bytes)) for found in measured[0]] == ["dp", "pp", "tp"]
    with pytest.raises(LockstepError, match=r"ask for \[2, 4\] processes"):
        measure_layouts(config, [{"parallel": {"dp": 2}}, {"parallel": {"dp": 4}}])


BETWEEN_PROCESSES: list[dict[str, Any]] = [
    {"dp": 2, "bucket_mb": 1},
    {"dp": 2, "fsdp": 2},
    {"dp": 2, "fsdp": 3},
    {"pp": 2, "schedule": "zb-v"},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"cp": 2},
]


def test_every_way_of_sending_works_between_processes(tiny: Tiny) -> None:
    """Two real processes over Gloo, whose messages have rules that threads need not keep: every layout takes a step."""
    train, eager = {"canonical_tp": 2, "micro_batch": 1, "micro_batches": 4}, {"level": "O0"}
    layouts: list[dict[str, Any]] = [
        {"parallel": parallel, "train": train, "compile": eager} for parallel in BETWEEN_PROCESSES
    ]
    compiled = ({"dp": 2, "fsdp": 3}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2})
    layouts += [{"parallel": parallel, "train": train, "compile": {"level": "O2"}} for parallel in compiled]
    experts = {"model": with_experts("qwen3_moe"), "train": {**train, "canonical_tp": 1}}
    layouts.append({"parallel": {"dp": 2, "ep": 2}, "compile": {"level": "O2"}, **experts})
    measured = measure_layouts(tiny(model={**MODEL, "num_kv_heads": 2}), layouts, rounds=1, steps=1, warm_up=0)
    for asked, found in zip(layouts, measured, strict=True):
        axis = next(name for name, size in asked["parallel"].items() if size == 2)
        assert len(found.seconds) == 1
        assert found.sent_bytes[axis] > 0


def refused(config: Config, mesh: Mesh | None = None, **parallel: Any) -> str:
    with pytest.raises(LockstepError) as error:
        Trainer(config, mesh=mesh, parallel=parallel)
    return str(error.value)


def test_layouts_that_cannot_be_are_told(tiny: Tiny) -> None:
    assert "pp2 dp2 = 4 processes, and this is one" in refused(tiny(), pp=2, dp=2)

    wrong = {
        "dp 3 x cp 1 x tp 1 = 3 ranks, but 2 processes were started": ("dp", {"dp": 3}, {}),
        "parallel asks for pp2, but the mesh that was given is dp2": ("dp", {"pp": 2}, {}),
        "parallel.cp is 2: in attention each rank takes some of the 1 key heads": ("dp", {"cp": 2}, {}),
        "parallel.ep is 2, but the model has no experts": ("dp", {"dp": 2, "ep": 2}, {}),
        "parallel.ep is 2, which does not divide the model's 5 experts":
            ("dp", {"dp": 2, "ep": 2}, {"model": with_experts("mixtral"), "train": {"micro_batches": 2}}),
        "train.micro_batches is 3, which parallel.dp 2 does not divide: with parallel.ep 2":
            ("dp", {"dp": 2, "ep": 2}, {"model": with_experts("qwen3_moe")}),
        "train.micro_batches is 3, which parallel.dp 2 does not divide": ("dp", {"dp": 2, "fsdp": 3}, {}),
        "lora.rank 2 with parallel.fsdp 3":
            ("dp", {"dp": 2, "fsdp": 3}, {"lora": {"rank": 2}, "train": {"micro_batches": 2}}),
        "train.micro_batches is 1, fewer than the 2 replicas": ("dp", {"dp": 2}, {"train": {"micro_batches": 1}}),
        "train.gradient_groups is 2, fewer than the 3 replicas":
            ("dp", {"dp": 3}, {"train": {"micro_batches": 4, "gradient_groups": 2}}),
        "train.gradient_groups is 3, which parallel.dp 2 does not divide: with parallel.ep 2":
            ("dp", {"dp": 2, "ep": 2}, {"model": with_experts("qwen3_moe"),
             "train": {"micro_batches": 6, "gradient_groups": 3}}),
        "did you mean '1f1b'": ("pp", {"pp": 2, "schedule": "1f2b"}, {}),
        "2 layers, too few for 2 pipeline stages x 2 chunks (zb-v)": ("pp", {"pp": 2, "schedule": "zb-v"}, {}),
        "is [2, 2]: give 2 numbers (one per stage) that sum to the model's 2 layers":
            ("pp", {"pp": 2, "layers_per_stage": [2, 2]}, {}),
        "parallel.tp is 3, which is no power of two": ("tp", {"tp": 3}, {}),
        "is [3, -1]: give 2 numbers (one per stage) that sum to the model's 2 layers, each at least 1":
            ("pp", {"pp": 2, "layers_per_stage": [3, -1]}, {}),
        "recompute_per_stage is [1, 2], but stage 1 has 1 layers: give at most [1, 1]":
            ("pp", {"pp": 2, "recompute_per_stage": [1, 2]}, {}),
        "offload_layers is 3, but the model has 2 layers": ("pp", {"pp": 2, "offload_layers": 3}, {}),
        "adapters train with data parallelism only": ("pp", {"pp": 2}, {"lora": {"rank": 2}}),
    }  # fmt: skip
    for expected, (axis, parallel, sections) in wrong.items():
        config = tiny(**sections)
        on_threads(MeshShape(**{axis: 2}), functools.partial(_refused_on, config, parallel, expected))


def _refused_on(config: Config, parallel: dict[str, Any], expected: str, mesh: Mesh) -> None:
    assert expected in refused(config, mesh, **parallel)


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_train_on_two_replicas(tiny: Tiny, tmp_path: Path, level: int) -> None:
    train = {**TRAIN, "export": True, "micro_batches": 4, "eval_every": 0}
    config = functools.partial(tiny, lora={"rank": 2, "merge": True}, train=train)
    Trainer(config(tmp_path / "alone")).fit()
    run(config(tmp_path / "mesh"), {"dp": 2, "fsdp": level})
    left, right = (load_checkpoint(checkpoints(tmp_path / n)[-1]).tensors("adapters") for n in ("alone", "mesh"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    files = [(tmp_path / n / "export" / "model.safetensors").read_bytes() for n in ("alone", "mesh")]
    assert files[0] == files[1]


@pytest.mark.parametrize("parallel", [{"pp": 2}, {"dp": 2, "fsdp": 3}], ids=str)
def test_a_mesh_exports_the_whole_model(tiny: Tiny, tmp_path: Path, parallel: dict[str, Any]) -> None:
    train = {**TRAIN, "export": True, "micro_batches": 4, "eval_every": 0}
    config = functools.partial(tiny, model={**MODEL, "tie_embeddings": False}, train=train)
    Trainer(config(tmp_path / "alone")).fit()
    run(config(tmp_path / "mesh"), parallel)
    files = [(tmp_path / n / "export" / "model.safetensors").read_bytes() for n in ("alone", "mesh")]
    assert files[0] == files[1]


def test_processes_train_and_one_that_is_killed_ends_the_others(tiny: Tiny, text: Path, tmp_path: Path) -> None:
    """`lockstep train` with two real processes; one is killed; the run goes on with one process and ends as it must."""
    train = {**TRAIN, "steps": 12, "eval_every": 0}
    tree = tiny_tree(text, tmp_path / "mesh", model=MODEL, train=train, parallel={"dp": 2})
    file, log = tmp_path / "run.yaml", tmp_path / "log"
    file.write_text(yaml.safe_dump(tree))
    process = start(["train", str(file)], log)
    _until(lambda: len(checkpoints(tmp_path / "mesh")) >= 2, process, log)
    ranks = sorted(_children(process.pid))
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    process.join(60)
    told = [line for line in log.read_text().splitlines() if line.startswith("lockstep:")]
    assert told == [
        "lockstep: rank 1 of 2 was killed by SIGKILL (out of memory?); the others were ended. "
        "Go on from the last checkpoint with --resume"
    ]
    assert process.exitcode == 2
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    Trainer(check(Config, tree, "test"), resume=tmp_path / "mesh", parallel={"dp": 1}).fit()
    Trainer(tiny(tmp_path / "whole", model=MODEL, train=train)).fit()
    same(tmp_path / "mesh", tmp_path / "whole", ["step-00000012"])


def _until(done: Callable[[], bool], process: Any, log: Path) -> None:
    end = time.monotonic() + 90
    while not done():
        assert process.is_alive(), log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def test_a_plan_is_run_as_it_is(tiny: Tiny, tmp_path: Path) -> None:
    from lockstep.plan import Batch, Layout, Plan, predict
    from lockstep.plan.decoder_config import planner_shape
    from lockstep.train.planned import planned

    config = tiny(model={**MODEL, "vocab_size": 300})
    shape = planner_shape(config.model)
    batch = Batch(8, 16)
    chosen = Layout(pp=2, micro_batch=2, schedule="zb-h1", recompute_per_stage=(1, 0))
    Plan(shape, "2xcpu", batch, chosen, predict(shape, chosen, "2xA100-80", batch)).save(tmp_path / "plan.yaml")
    found = planned(config, tmp_path / "plan.yaml")
    assert (found.train.micro_batch, found.train.micro_batches, found.data.seq_len) == (2, 4, 16)
    assert (found.parallel.pp, found.parallel.schedule, found.parallel.recompute_per_stage) == (2, "zb-h1", (1, 0))
    other = tiny(model={**MODEL, "num_layers": 6})
    with pytest.raises(LockstepError, match="another model: layers 4 in the plan, 6 in the model"):
        planned(other, tmp_path / "plan.yaml")
    assert json.loads(json.dumps(found.model_dump(mode="json")))["parallel"]["pp"] == 2
