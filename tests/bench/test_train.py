"""The training bench with tiny sizes: real processes, real peers."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lockstep.bench import train_own
from lockstep.bench.shapes import shape
from lockstep.bench.train import Found, _notes, bench_train, check_same_work, write_inputs
from lockstep.errors import LockstepError

RUN = {"model": "tiny", "rounds": 2, "size": (2, 32), "note": lambda line: None}


def test_every_side_does_the_same_work_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.bench.train.matrix_meter", lambda dtype: lambda: 1e11)  # to measure it takes seconds
    vs = ["hf-eager"]
    report = bench_train(vs=vs, peers=tmp_path, **RUN)
    sides = {side["name"]: side for side in report.data["sides"]}
    assert list(sides) == ["lockstep", *vs]
    for side in sides.values():
        assert len(side["seconds"]) == 2
        assert len(side["losses"]) == 1 + 1 + 2, "the first step, the warm-up, the measured ones"
        assert abs(side["losses"][0] - math.log(512)) < 0.2, "random weights know nothing of 512 tokens"
        assert side["losses"][-1] < side["losses"][0]
        assert 2**26 < side["peak_bytes"] < 2**32
    assert [row[0] for row in report.rows] == list(sides)
    assert report.command == f"lockstep bench train --model tiny --vs {','.join(vs)} --rounds 2"
    json.loads(report.json())


@pytest.mark.parametrize("side", ["lockstep", "lockstep-fast", "lockstep-fast-float32", "lockstep-pure-bf16"])
def test_our_sides_begin_with_the_same_loss_and_learn(side, tmp_path, monkeypatch):
    write_inputs(shape("tiny"), (2, 32), tmp_path)
    steps = []
    monkeypatch.setattr(train_own, "serve", steps.append)
    train_own.main(str(tmp_path / "model"), str(tmp_path / "tokens.npy"), side, "1e-3")
    losses = [step() for step in steps for _ in range(3)]
    assert abs(losses[0] - math.log(512)) < 0.2
    assert losses[2] < losses[1] < losses[0]


def test_the_pure_side_updates_as_the_peer_does():
    drawn = [torch.randn(5, 3, dtype=torch.bfloat16), torch.randn(7, dtype=torch.bfloat16)]
    ours, theirs = ([torch.nn.Parameter(x.clone()) for x in drawn] for _ in range(2))
    update = train_own.FusedAdamW(ours, 1e-2)
    peer = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)
    for _ in range(3):
        for mine, its in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            its.grad = mine.grad.clone()
        update()
        peer.step()
    assert all(torch.equal(mine, its) for mine, its in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0].detach(), drawn[0])


def test_an_unknown_side_and_a_missing_peer_are_told_before_anything_runs(tmp_path, monkeypatch):
    with pytest.raises(LockstepError, match=r"--vs names 'hf'.*hf-eager"):
        bench_train(vs=["hf"], peers=tmp_path, **RUN)
    with pytest.raises(LockstepError, match="known shapes are tiny, llama-27m"):
        bench_train(vs=[], peers=tmp_path, **(RUN | {"model": "huge"}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LockstepError, match=r"peers.sh transformers"):
        bench_train(vs=["hf-eager"], peers=tmp_path, **RUN)


def test_notes_compare_with_fast_and_with_the_peers_precision():
    seconds = {"lockstep": 1.1, "lockstep-fast": 1.0, "lockstep-fast-float32": 2.0}
    sides = [Found(name, [s, s], 1.0, 1, [2.0]) for name, s in seconds.items()]
    told = " ".join(_notes(sides, 1e9, [1e11]))
    assert "A step of `lockstep` is +10% against one of `lockstep-fast` (" in told
    assert "float32" not in told.split("A step of")[1]  # its twin did not run
    precise = [Found("lockstep-pure-bf16", [1.0], 1.0, 3, [2.0]), Found("hf-eager", [1.0], 1.0, 4, [2.0])]
    assert "on both sides ours takes 0.75 of the peak memory of `hf-eager`" in " ".join(
        _notes([*sides, *precise], 1e9, [1e11])
    )
    told = " ".join(_notes([*sides, Found("lockstep-float32", [1.0, 1.0], 1.0, 1, [2.0])], 1e9, [1e11]))
    assert "`lockstep-float32` is -50% against one of `lockstep-fast-float32`" in told


@pytest.mark.parametrize("loss", [2.02, float("nan")])
def test_sides_that_do_other_work_are_refused(loss):
    ours = Found("lockstep", [1.0], 1.0, 1, [2.0])
    check_same_work([ours, Found("peer", [1.0], 1.0, 1, [2.009])])
    with pytest.raises(LockstepError, match="do not do the same work"):
        check_same_work([ours, Found("peer", [1.0], 1.0, 1, [loss])])
