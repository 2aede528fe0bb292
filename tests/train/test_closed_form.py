"""`lockstep dryrun` of what the trainer refuses: the closed form, and why."""

import dataclasses
import json

import pytest

from lockstep.cli.app import run
from lockstep.plan import Batch, Layout, ModelShape, Plan, predict, rank_memory

SHAPE = ModelShape("m", 4, 256, 4, 2048, intermediate=704, kv_heads=2, head_dim=64, gated=True, tied=False)
EXPERTS = dataclasses.replace(SHAPE, experts=4, experts_per_token=2, expert_intermediate=704)
BATCH = Batch(16, 128)


@pytest.mark.parametrize(
    ("shape", "layout", "why"),
    [
        (EXPERTS, Layout(cp=2), "parallel.cp is 2: layers with experts or latent attention"),
    ],
)
def test_a_plan_that_is_not_run(shape, layout, why, tmp_path, capsys):
    file = tmp_path / "plan.yaml"
    Plan(shape, "2xA100-80", BATCH, layout, predict(shape, layout, "2xA100-80", BATCH)).save(file)
    assert run(["dryrun", "--plan", str(file), "--rank", "1"]) == 0
    text = capsys.readouterr().out
    assert why in text.splitlines()[0]
    assert "rank 1 of" in text
    assert run(["dryrun", "--plan", str(file), "--rank", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak"] == int(rank_memory(shape, layout, BATCH, 1).peak)


def test_a_configuration_that_is_not_run(capsys):
    sets = ["parallel.dp=2", "parallel.cp=2", "data.seq_len=128", "train.micro_batch=2", "train.micro_batches=4"]
    asked = ["dryrun", "mixtral-8x7b", *(word for pair in sets for word in ("--set", pair))]
    assert run(asked) == 0
    assert "context parallelism" in capsys.readouterr().out.splitlines()[0]
    assert run([*asked, "--rank", "9"]) != 0, "a rank that the mesh does not have is still a mistake"
