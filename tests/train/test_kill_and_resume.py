"""Real processes, really killed: the resumed run ends in the bytes of the one that was left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import yaml
from tests.processes import finish, start
from tiny_run import tiny_tree

from lockstep.train.checkpoint import checkpoints, verify
from lockstep.train.metrics import read_metrics

STEPS = 20
FAST_SAVES = ["--set", "train.save_every=1"]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    folder = tmp_path_factory.mktemp("config")
    tree = tiny_tree(text, Path("unused"), train={"steps": STEPS, "save_every": 4, "dtype": "bfloat16"})
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, config_file: Path) -> Path:
    """The run that is left alone."""
    out = tmp_path_factory.mktemp("whole") / "run"
    code, printed = finish(["train", str(config_file), "--out", str(out)], out.parent / "log")
    assert code == 0, printed
    return out


def last(out: Path) -> dict[str, bytes]:
    path = checkpoints(out)[-1]
    assert path.name == f"step-{STEPS:08d}"
    verify(path)
    return {name: (path / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


def assert_same_run(out: Path, whole: Path) -> None:
    assert last(out) == last(whole)
    losses, expected = ({m["step"]: m["loss"] for m in read_metrics(o) if "loss" in m} for o in (out, whole))
    assert losses == expected
    assert list(losses) == list(range(1, STEPS + 1))


def kill(arguments: list[str], log: Path, when: float | None = None, during_save: Path | None = None) -> None:
    """Start a trainer and `kill -9` it after so many seconds of training, or while it writes a checkpoint."""
    before = set() if during_save is None else _unfinished(during_save)
    process = start(arguments, log)
    folder = Path(arguments[arguments.index("--out") + 1])
    _wait(lambda: (folder / "metrics.jsonl").exists() or process.exitcode is not None)
    if when is not None:
        time.sleep(when)
    if during_save is not None:
        _stop_in_a_save(process, during_save, before)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, log.read_text()


def _stop_in_a_save(process: ForkServerProcess, folder: Path, before: set[str]) -> None:
    """Stop it, so that it is still within a save when it is killed, however late that is."""
    assert process.pid is not None
    while True:
        _wait(lambda: bool(_unfinished(folder) - before) or process.exitcode is not None, 0.0)
        if process.exitcode is not None:
            return
        os.kill(process.pid, signal.SIGSTOP)
        _wait(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] == "T")
        if _unfinished(folder) - before:
            return
        os.kill(process.pid, signal.SIGCONT)


def _unfinished(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if name.startswith(".tmp-")} if folder.is_dir() else set()


def _wait(condition, pause: float = 0.01, limit: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(pause)


def test_kill_at_random_moments(tmp_path: Path, config_file: Path, whole: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    draw = random.Random(time.time_ns())
    for attempt in range(3):
        begun = ["--resume"] if attempt and checkpoints(out) else []
        pause = draw.uniform(0.0, 0.25)
        try:
            kill(["train", str(config_file), "--out", str(out), *FAST_SAVES, *begun], log, when=pause)
        except AssertionError:
            if "done: 20 steps" not in log.read_text():
                raise
            break
    resume = ["--resume"] if checkpoints(out) else []
    code, printed = finish(["train", str(config_file), "--out", str(out), *resume], log)
    assert code == 0, printed
    assert_same_run(out, whole)


def test_kill_in_the_middle_of_a_save(tmp_path: Path, config_file: Path, whole: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    arguments = ["train", str(config_file), "--out", str(out), *FAST_SAVES]
    left_behind = False
    for attempt in range(3):
        begun = ["--resume"] if attempt and checkpoints(out) else []
        kill([*arguments, *begun], log, during_save=out / "checkpoints")
        left_behind |= bool(_unfinished(out / "checkpoints"))
        for path in checkpoints(out):
            verify(path)
    assert left_behind, "no kill fell into a save"
    resume = ["--resume"] if checkpoints(out) else []
    code, printed = finish([*arguments, *resume], log)
    assert code == 0, printed
    assert not _unfinished(out / "checkpoints")
    assert_same_run(out, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_cleanly(
    tmp_path: Path, config_file: Path, whole: Path, number: signal.Signals
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    arguments = ["train", str(config_file), "--out", str(out)]
    process = start(arguments, log)
    _wait(lambda: len(read_metrics(out)) >= 2)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == 0
    printed = log.read_text()
    assert f"stopped by {number.name}" in printed
    assert f"--out {out} --resume" in printed
    verify(checkpoints(out)[-1])
    # Without a configuration file: the run has its own.
    code, printed = finish(["train", "--out", str(out), "--resume"], log)
    assert code == 0, printed
    assert_same_run(out, whole)


def test_two_trainers_on_one_directory(tmp_path: Path, config_file: Path) -> None:
    out = tmp_path / "run"
    arguments = ["train", str(config_file), "--out", str(out), "--steps", "100000", "--set", "train.save_every=0"]
    first = start(arguments, tmp_path / "one")
    _wait(lambda: (out / "metrics.jsonl").exists())
    code, printed = finish(arguments, tmp_path / "two")
    assert code == 2
    assert f"{out} is in use by process {first.pid}" in printed
    first.kill()
    first.join()
    # The lock died with its process. There is no checkpoint yet, so to go on means to begin.
    again = ["train", str(config_file), "--out", str(out), "--steps", "2", "--resume"]
    code, printed = finish(again, tmp_path / "three")
    assert code == 0, printed
    assert "begins again at its first step" in printed


def test_a_running_trainer_is_told_before_its_checkpoints(tmp_path: Path, config_file: Path) -> None:
    out = tmp_path / "run"
    arguments = ["train", str(config_file), "--out", str(out), "--steps", "100000"]
    first = start(arguments, tmp_path / "one")
    _wait(lambda: bool(checkpoints(out)))
    code, printed = finish(arguments, tmp_path / "two")
    assert code == 2
    assert f"{out} is in use by process {first.pid}" in printed
    first.kill()
    first.join()


def test_changes_that_change_bits_are_refused(tmp_path: Path, config_file: Path, whole: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    arguments = ["train", str(config_file), "--out", str(out)]
    code, _ = finish([*arguments, "--resume-from", str(checkpoints(whole)[0]), "--set", "optimizer.lr=0.1"], log)
    assert code == 2
    assert "optimizer.lr: 0.002 -> 0.1" in log.read_text()
    assert "--allow-changes" in log.read_text()
    more = ["--resume-from", str(checkpoints(whole)[-1]), "--steps", "22", "--allow-changes"]
    code, printed = finish([*arguments, *more], log)
    assert code == 0, printed
    assert checkpoints(out)[-1].name == "step-00000022"


def test_another_device_class_is_refused(tmp_path: Path, config_file: Path, whole: Path) -> None:
    import shutil

    copy = tmp_path / "run" / "checkpoints" / "step-00000020"
    shutil.copytree(checkpoints(whole)[-1], copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"device_class": "cuda-sm90"}))
    code, printed = finish(["train", str(config_file), "--out", str(tmp_path / "run"), "--resume"], tmp_path / "log")
    assert code == 2
    assert "device class: cuda-sm90 -> cpu-" in printed


def test_a_directory_with_a_run_is_refused_without_resume(config_file: Path, whole: Path, tmp_path: Path) -> None:
    code, printed = finish(["train", str(config_file), "--out", str(whole)], tmp_path / "log")
    assert code == 2
    assert "already holds a run" in printed
    assert "--resume" in printed
