"""`lockstep dryrun` of what the trainer refuses: the closed form, and why."""

import json

import pytest

from lockstep.cli.app import run
from lockstep.plan import Batch, Layout, ModelShape, Plan, predict, rank_memory

SHAPE = ModelShape("m", 4, 256, 4, 2048, intermediate=704, kv_heads=2, head_dim=64, gated=True, tied=False)
BATCH = Batch(16, 128)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (Layout(cp=2), "parallel.cp is 2: context parallelism is planned for"),
        (Layout(dp=2, fsdp=3), "parallel.fsdp is 3: sharded"),
        (Layout(pp=2, offload_per_stage=(1, 0)), "1 layers of a stage are to be offloaded"),
    ],
)
def test_a_plan_that_is_not_run(layout, why, tmp_path, capsys):
    file = tmp_path / "plan.yaml"
    Plan(SHAPE, "2xA100-80", BATCH, layout, predict(SHAPE, layout, "2xA100-80", BATCH)).save(file)
    assert run(["dryrun", "--plan", str(file), "--rank", "1"]) == 0
    text = capsys.readouterr().out
    assert why in text.splitlines()[0]
    assert "rank 1 of" in text
    assert run(["dryrun", "--plan", str(file), "--rank", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak"] == int(rank_memory(SHAPE, layout, BATCH, 1).peak)


def test_a_configuration_that_is_not_run(capsys):
    sets = ["parallel.cp=2", "data.seq_len=128", "train.micro_batch=2", "train.micro_batches=4"]
    asked = ["dryrun", "smollm2-135m", *(word for pair in sets for word in ("--set", pair))]
    assert run(asked) == 0
    assert "context parallelism" in capsys.readouterr().out.splitlines()[0]
    assert run([*asked, "--rank", "9"]) != 0, "a rank that the mesh does not have is still a mistake"
