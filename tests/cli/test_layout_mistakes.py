"""A layout that cannot be is told at once: before processes start, and before PyTorch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.plan import Batch, Layout, ModelShape, Plan, predict

RUN = """
import sys
from lockstep.cli.app import run
code = run(sys.argv[1:])
sys.exit(100 + code if "torch" in sys.modules else code)
"""


def refused(*arguments: str) -> str:
    """What is said, by a process that ends without having imported torch."""
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("parallel.dp=3", "train.micro_batches=2"), "train.micro_batches is 2, fewer than the 3 replicas"),
        (("parallel.pp=2", "parallel.schedule=1f2b"), "did you mean '1f1b'"),
        (("parallel.pp=8",), "the model has 6 layers, too few for 8 pipeline stages"),
        (("parallel.tp=2",), "canonical_tp"),
        (("parallel.dp=2", "data.seq_len=4096"), "longer than the model's max_positions 1024"),
    ],
)
def test_of_a_configuration(keys: tuple[str, ...], said: str) -> None:
    assert said in refused("train", *(word for key in keys for word in ("--set", key)))


def test_of_a_run_that_is_not_there(tmp_path: Path) -> None:
    out = tmp_path / "none"
    said = refused("train", "--out", str(out), "--resume", "--set", "parallel.dp=2", "--set", "train.micro_batches=2")
    assert f"there is nothing to resume: {out} is no directory" in said


def test_of_a_plan(tmp_path: Path) -> None:
    shape, batch = ModelShape("m", 4, 64, 4, 128, gated=True), Batch(8, 64)
    layout = Layout(dp=2)
    file = tmp_path / "plan.yaml"
    Plan(shape, "2xA100-80", batch, layout, predict(shape, layout, "2xA100-80", batch)).save(file)
    assert "this plan is for another model: layers 4 in the plan, 6 in the model" in refused(
        "train", "--plan", str(file)
    )
    file.write_text(file.read_text().replace("dp: 2", "dp: 4"))
    for command in ("train", "dryrun"):
        assert "cluster is '2xA100-80', and the layout takes 4 devices" in refused(command, "--plan", str(file))


def test_more_processes_than_a_machine_runs() -> None:
    said = refused("train", "--set", "parallel.dp=4096", "--set", "train.micro_batches=4096")
    assert "4096 processes" in said
    assert "torchrun" in said
