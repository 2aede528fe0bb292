"""Checkpoint directories: whole or refused by name, whatever happens to them or while they are written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import LockstepError
from lockstep.train.checkpoint import (
    check_shapes,
    checkpoints,
    load_checkpoint,
    newest_whole,
    prune,
    remove_unfinished,
    save_checkpoint,
    set_aside_after,
    step_path,
    verify,
)
from lockstep.train.checkpoint import save as save_module


def write(out: Path, step: int, value: float = 1.0, **keys: Any) -> Path:
    path = step_path(out, step)
    tensors = {"model": {"w": torch.full((4, 3), value)}}
    save_checkpoint(path, step, tensors, {"state": {"step": step}}, "0", "cpu-test", **keys)
    return path


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    found = load_checkpoint(write(tmp_path, 3))
    assert torch.equal(found.tensors("model")["w"], torch.ones(4, 3))
    assert found.document("state") == {"step": 3}
    assert (found.manifest.step, found.manifest.device_class) == (3, "cpu-test")
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_extra_files_are_in_the_manifest(tmp_path: Path) -> None:
    def extra(folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "file.txt").write_text("x")

    path = write(tmp_path, 1, extra=extra)
    (path / "inner" / "file.txt").write_text("y")
    with pytest.raises(LockstepError, match=r"inner/file.txt was altered"):
        verify(path)


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("model.safetensors", truncate, r"model.safetensors is truncated: \d+ bytes where the manifest says"),
        ("model.safetensors", flip, "model.safetensors was altered: its SHA-256"),
        ("model.safetensors", Path.unlink, "model.safetensors is missing"),
        ("manifest.json", Path.unlink, "no whole checkpoint: manifest.json is missing"),
        ("manifest.json", truncate, "manifest.json cannot be read"),
    ],
)
def test_damage_is_named_and_the_newest_whole_one_offered(
    tmp_path: Path, name: str, damage: Callable[[Path], None], reason: str
) -> None:
    write(tmp_path, 1)
    good, bad = write(tmp_path, 2), write(tmp_path, 3)
    damage(bad / name)
    with pytest.raises(LockstepError, match=reason) as error:
        load_checkpoint(bad)
    assert str(bad) in str(error.value)
    assert f"--resume-from {good}" in str(error.value)
    assert newest_whole(tmp_path) == good


def test_another_format_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    fields = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(fields | {"format": 99}))
    with pytest.raises(LockstepError, match="has format 99"):
        verify(path)


@pytest.mark.parametrize("files", [5, [], {"model.safetensors": "x"}, {"model.safetensors": {"bytes": None}}])
def test_a_manifest_of_another_shape_is_damaged(tmp_path: Path, files: Any) -> None:
    path = write(tmp_path, 1)
    fields = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(fields | {"files": files}))
    with pytest.raises(LockstepError, match=r"is damaged: manifest.json cannot be read"):
        verify(path)


@pytest.mark.parametrize("at", ["save_tensors", "_seal", "_publish"])
def test_a_full_disk_leaves_the_old_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    old = write(tmp_path, 1, 1.0)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(save_module, at, full)
    for step in (1, 2):
        with pytest.raises(LockstepError, match="No space left on device"):
            write(tmp_path, step, 2.0)
    assert checkpoints(tmp_path) == [old]
    assert torch.equal(load_checkpoint(old).tensors("model")["w"], torch.ones(4, 3))
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_real_write_limit_is_told(tmp_path: Path) -> None:
    """The kernel itself refuses the write here: a limit on the size of files, in a child process."""
    child = os.fork()
    if child == 0:
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        try:
            write(tmp_path, 1)
        except LockstepError as error:
            os._exit(7 if "cannot save checkpoint" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert checkpoints(tmp_path) == []


def test_same_step_is_replaced_and_a_kill_between_the_renames_is_mended(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 1.0)
    write(tmp_path, 1, 2.0)
    assert float(load_checkpoint(path).tensors("model")["w"][0, 0]) == 2.0
    path.rename(path.with_name(".old-" + path.name))
    (path.parent / ".tmp-step-00000001").mkdir()
    remove_unfinished(path.parent)
    assert checkpoints(tmp_path) == [path]
    assert float(load_checkpoint(path).tensors("model")["w"][0, 0]) == 2.0


def test_retention(tmp_path: Path) -> None:
    for step in (10, 20, 25, 30, 35):
        write(tmp_path, step)
    prune(tmp_path, keep_last=2, keep_every=20)
    assert [p.name[-2:] for p in checkpoints(tmp_path)] == ["20", "30", "35"]
    prune(tmp_path, keep_last=1, keep_every=0)
    assert [p.name[-2:] for p in checkpoints(tmp_path)] == ["35"]


def test_later_checkpoints_are_set_aside_not_lost(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    set_aside_after(tmp_path, 1)
    write(tmp_path, 2)
    set_aside_after(tmp_path, 1)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000001"]
    aside = sorted(p.name for p in (tmp_path / "checkpoints").glob("set-aside-*"))
    assert aside == ["set-aside-step-00000002", "set-aside-step-00000002-2", "set-aside-step-00000003"]


def test_shapes_that_do_not_fit_are_named() -> None:
    found = {"a": torch.ones(2), "b": torch.ones(3, 4), "c": torch.ones(1), "e": torch.ones(1)}
    wanted = {"a": torch.ones(2), "b": torch.ones(3, 5), "d": torch.ones(1), "e": torch.ones(1).double()}
    with pytest.raises(LockstepError) as error:
        check_shapes(Path("step-1"), found, wanted)
    message = str(error.value)
    assert "b is [3, 4], the model has [3, 5]" in message
    assert "c is not in the model" in message
    assert "d is missing" in message
    assert "e is torch.float32, the model has torch.float64" in message
