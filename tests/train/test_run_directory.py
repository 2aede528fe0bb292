"""The lock, the signals, the metrics file, and what a resumed configuration may change."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_run import with_experts

from lockstep.config import Config
from lockstep.errors import LockstepError
from lockstep.train.changes import changes
from lockstep.train.display import Display, StepLine
from lockstep.train.lock import run_lock
from lockstep.train.metrics import Metrics, read_metrics
from lockstep.train.report import amount, plan_lines, result_lines
from lockstep.train.signals import stop_on_signal
from lockstep.train.trainer import Result, Trainer


def test_the_lock_is_given_back(tmp_path: Path) -> None:
    with run_lock(tmp_path / "run"), pytest.raises(LockstepError, match="another Trainer of this process"):
        run_lock(tmp_path / "run").__enter__()
    with run_lock(tmp_path / "run"):
        pass


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LockstepError, match=r"train.out: cannot write in .*file/run"):
        run_lock(tmp_path / "file" / "run").__enter__()


def test_the_second_signal_exits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signal() as stop:
        assert not stop
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == "SIGTERM"
        assert codes == []
        signal.raise_signal(signal.SIGINT)
        assert codes == [128 + signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before


def test_metrics_of_steps_that_are_made_again_are_dropped(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 1, False, print)
    for step in (1, 2, 3):
        metrics.write(step, loss=float(step))
    metrics.write(4, loss=float("nan"), grad_norm=float("inf"))
    metrics.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1] == {"step": 4, "loss": "nan", "grad_norm": "inf"}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # cut short by a kill
    Metrics(tmp_path, 3, False, print).close()
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2]


def test_lines_that_are_no_metrics_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"st\n\xff\n[1]\n{}\n{"step": 2}\n')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]


def test_a_full_disk_keeps_metrics_back_and_says_so_once(tmp_path: Path) -> None:
    notes: list[str] = []
    metrics = Metrics(tmp_path, 1, False, notes.append)
    metrics._file = open("/dev/full", "a")  # noqa: SIM115
    for step in (1, 2, 3):
        metrics.write(step, loss=1.0)
    metrics.close()
    assert len(notes) == 1
    assert f"{tmp_path}/metrics.jsonl: No space left on device. Training goes on" in notes[0]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"train": {"out": "elsewhere", "save_every": 7, "eval_every": 3, "export": True}}, []),
        ({"data": {"sources": ["moved.txt"]}}, []),
        ({"optimizer": {"lr": 0.1}}, ["optimizer.lr: 0.002 -> 0.1"]),
        ({"train": {"steps": 400}}, ["train.steps: 300 -> 400"]),
        ({"train": {"dtype": "float32"}}, ["train.dtype: 'bfloat16' -> 'float32'"]),
        ({"model": {"num_layers": 7}}, ["model.num_layers: 6 -> 7"]),
        ({"data": {"seq_len": 256}}, ["data.seq_len: 512 -> 256"]),
        ({"train": {"gradient_groups": 1}}, ["train.gradient_groups: 2 -> 1"]),
        ({"train": {"gradient_groups": 2}}, []),  # as many as there are micro-batches, which is what none stands for
    ],
)
def test_which_changes_change_bits(sections: dict[str, Any], expected: list[str]) -> None:
    old = Config().model_dump(mode="json")
    new = {name: {**old[name], **sections.get(name, {})} for name in old}
    assert changes(old, new) == expected


def test_more_steps_of_a_constant_schedule_change_nothing() -> None:
    old = Config().model_dump(mode="json")
    old["schedule"]["kind"] = "constant"
    assert changes(old, {**old, "train": {**old["train"], "steps": 999}}) == []


def test_the_command_that_goes_on_can_be_pasted() -> None:
    trainer: Any = SimpleNamespace(out=Path("my runs/a"), config=Config())
    lines = list(result_lines(trainer, Result(3, 1.0, None, None, "SIGTERM")))
    assert lines == ["stopped by SIGTERM after step 3 of 300", "go on with: lockstep train --out 'my runs/a' --resume"]


def test_parameters_that_do_not_train_are_no_adapters(tiny: Callable[..., Config]) -> None:
    """Routers of this family have a bias each that no gradient reaches."""
    trainer = Trainer(tiny(model=with_experts("deepseek_v3")))
    try:
        line = next(iter(plan_lines(trainer)))
    finally:
        trainer.close()
    assert line.endswith("parameters, 24 of which do not train"), "three layers with experts, eight of them each"
    assert line.startswith("model     deepseek_v3, ")


def test_the_display_prints_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Display() as display:
        for step in (1, 2, 3):
            display.step(StepLine(step, 3, 2.5, 1234.0, 0.412, 2**30, 61.0))
    lines = capsys.readouterr().err.splitlines()
    # The first and the last; those between come every ten seconds.
    assert lines[0] == "step 1/3  loss 2.5000  1,234 tok/s  MFU 41.2%  1.00 GiB  1:01 left"
    assert [line.split()[1] for line in lines] == ["1/3", "3/3"]


def test_preparation_that_takes_long_says_its_end_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 0.0, 1.0, 3.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr("lockstep.train.display.time.monotonic", lambda: next(clock))
    with Display() as display:
        for done in (0, 1_000_000, 2_000_000, 3_000_000, 4_000_000, 4_000_000):
            display.preparing("tokenising", done, 4_000_000)
    assert capsys.readouterr().err.splitlines() == ["tokenising: 2.0 of 4.0 MB", "tokenising: 4.0 of 4.0 MB"]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (512, "512"), (80_250, "80.2 k"), (5_480_000, "5.48 M"), (12e9, "12 G")]
)
def test_amounts(number: float, text: str) -> None:
    assert amount(number) == text
