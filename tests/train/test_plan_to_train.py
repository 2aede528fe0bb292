"""From `lockstep plan` to `lockstep train --plan`: what the search proposes for two processes runs as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.processes import start
from tests.ranks_as_threads import on_threads
from tests.train.test_mesh_runs import losses, same
from tests.train.tiny_run import tiny_tree

from lockstep.cli.app import run
from lockstep.config import Config
from lockstep.config.check import check
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.transport import NoTransport
from lockstep.plan import Coefficients, Layout, Plan, load_cluster, load_plan, model_shape, predict
from lockstep.plan.evaluate import evaluate
from lockstep.plan.search import make_batch
from lockstep.train import Trainer, speed
from lockstep.train.layout import partition
from lockstep.train.planned import planned

MACHINE: dict[str, Any] = {
    "name": "two-processes",
    "device": {
        "matrix_tflops": {"bf16": 0.06, "fp32": 0.06}, "memory_gb": 8, "memory_gb_s": 8, "cores": 1,
        "matrix_efficiency": 1.0, "half_k": 60, "memory_efficiency": 1.0, "launch_us": 20, "host_gb_s": 1.0,
        "host_memory_gb": 2,
    },
    "levels": [{"name": "machine", "size": 2, "gb_s": 1.5, "latency_us": 60, "hop_us": 30}],
    "sources": ["made up for a test"],
}  # fmt: skip


class _Absent(NoTransport):
    """A rank that talks to nobody: what it would hold needs no message."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


ASKED = ["--seq", "32", "--global-batch-tokens", "256", "--no-report"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "matrix_peak", lambda dtype: 1e11)


@pytest.fixture
def written(text: Path, tmp_path: Path) -> dict[str, Any]:
    """A run's file and a description of the machine, in the working directory."""
    model = {"num_layers": 4, "num_kv_heads": 2}
    train = {"steps": 2, "save_every": 2, "eval_every": 2}
    tree = tiny_tree(text, tmp_path / "mesh", model=model, train=train)
    tree["model"] = {**tiny_tree(text, tmp_path)["model"], **model}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "here.yaml").write_text(yaml.safe_dump(MACHINE))
    return tree


def plan(tmp_path: Path, *pins: str) -> Plan:
    pinned = [word for pin in pins for word in ("--pin", pin)]
    file = str(tmp_path / "plan.yaml")
    cluster = f"2x{tmp_path / 'here.yaml'}"
    assert run(["plan", str(tmp_path / "run.yaml"), "--cluster", cluster, *ASKED, *pinned, "--out", file]) == 0
    return load_plan(file)


@pytest.mark.parametrize(
    "pins",
    [("tp=2",), ("dp=2", "fsdp=3", "recompute=full"), ("pp=2", "offload_layers=1", "schedule=1f1b")],
    ids=str,
)
def test_a_plan_trains_to_the_bytes_of_one_process(
    written: dict[str, Any], tmp_path: Path, pins: tuple[str, ...]
) -> None:
    found = plan(tmp_path, *pins)
    config = planned(check(Config, written, "test"), tmp_path / "plan.yaml")
    shape = MeshShape.of(config.parallel)
    assert shape.size == found.layout.devices == 2

    def work(mesh: Mesh) -> None:
        Trainer(config, mesh=mesh).fit()

    on_threads(shape, work)
    train = config.train.model_copy(update={"out": str(tmp_path / "alone")})
    alone = config.model_copy(update={"train": train})
    Trainer(
        alone,
        parallel={
            "pp": 1, "dp": 1, "cp": 1, "tp": 1, "fsdp": 0, "recompute_layers": 0, "recompute": "none",
            "offload_layers": 0,
        },
    ).fit()  # fmt: skip
    same(tmp_path / "alone", tmp_path / "mesh")
    assert losses(tmp_path / "alone") == losses(tmp_path / "mesh")


def test_the_trainer_takes_every_candidate(written: dict[str, Any], tmp_path: Path) -> None:
    """Every layout that the search looks at for a dense model on this machine, up to the parts that a rank would
    hold."""
    shape, place = model_shape(tmp_path / "run.yaml"), load_cluster(f"2x{tmp_path / 'here.yaml'}")
    batch = make_batch(512, 32)
    predicted = predict(shape, Layout(dp=2), place, batch)  # not what is tested
    found, seen = evaluate(shape, place, batch, {}, Coefficients()), set()
    for row in range(len(found.memory)):
        layout = found.layout(row)
        Plan(shape, place.name, batch, layout, predicted).save(tmp_path / "plan.yaml")
        config = planned(check(Config, written, "test"), tmp_path / "plan.yaml")
        mesh = Mesh(MeshShape.of(config.parallel), _Absent(1, 2))
        model = check(type(config.model), config.model.model_dump() | {"canonical_tp": layout.tp}, "test")
        assert partition(config, model, mesh) is not None
        seen.add((layout.schedule, layout.tp, layout.fsdp))
    assert {fsdp for _, _, fsdp in seen} == {0, 1, 2, 3}
    assert {tp for _, tp, _ in seen} == {1, 2}
    assert len({schedule for schedule, _, _ in seen}) >= 8


def test_two_processes_run_the_plan_that_the_search_chose(
    written: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a user does it: plan, then train; nothing pinned."""
    found = plan(tmp_path)
    assert "note:" not in capsys.readouterr().out
    log = tmp_path / "log"
    process = start(["train", str(tmp_path / "run.yaml"), "--plan", str(tmp_path / "plan.yaml")], log)
    process.join(120)
    assert process.exitcode == 0, log.read_text()
    config = planned(check(Config, written, "test"), tmp_path / "plan.yaml")
    assert config.parallel.pp * config.parallel.dp * config.parallel.tp == found.layout.devices == 2
    assert [line[0] for line in losses(tmp_path / "mesh") if line[1] is not None] == [1, 2]


def test_what_the_trainer_would_refuse_is_said_while_planning(
    written: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--seq", "4096", "--global-batch-tokens", "4M", "--no-report", "--out", str(tmp_path / "p")]
    assert run(["plan", "mixtral-8x7b", "--cluster", "64xH100", *asked]) == 0
    layout = load_plan(tmp_path / "p").layout
    assert (layout.cp, layout.tp, any(layout.offloaded)) == (1, 1, False)
    assert layout.ep > 1, "experts are spread"
