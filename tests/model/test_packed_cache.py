"""The cache of packed weights: a second load packs nothing, with the same bytes; nothing is used across a mismatch."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from lockstep.model import PackedCache, load
from lockstep.model.weights import packed
from tests.model.tiny import same_bytes, tiny
from tests.processes import context

IDS = [5, 17, 3, 90, 44, 8, 61, 2, 30]
MODELS = ["smollm2", "gemma2", "mixtral", "deepseek_v3", "deepseek_v3 absorbed", "llama2 cut"]


@pytest.fixture(params=MODELS)
def directory(request, tmp_path) -> Path:
    return model_dir(request.param, tmp_path / "model")


@pytest.fixture
def smollm2(tmp_path) -> Path:
    return model_dir("smollm2", tmp_path / "model")


def model_dir(what: str, path: Path) -> Path:
    name, _, form = what.partition(" ")
    tiny(name).save_pretrained(path)
    more = {"absorbed": {"mla_form": "absorbed"}, "cut": {"canonical_tp": 2}}.get(form, {})
    (path / "config.json").write_text(json.dumps({**json.loads((path / "config.json").read_text()), **more}))
    return path


def cache(path: Path, notes: list[str], **more) -> PackedCache:
    return PackedCache(notes.append, directory=path / "kept", small=0, **more)


def logits(model) -> torch.Tensor:
    return model.logits(IDS)


def no_packing(*_: object, **__: object) -> None:
    raise AssertionError("a weight was packed")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_load_packs_nothing_and_has_the_same_bytes(directory, tmp_path, dtype, monkeypatch):
    """float32 is the file's own dtype: its parameters stay views of it. bfloat16 is rounded, and kept."""
    notes: list[str] = []
    expected = load(directory, dtype=dtype)
    bits = logits(expected)
    first = load(directory, dtype=dtype, packed=cache(tmp_path, notes))
    monkeypatch.setattr(torch.ops.lockstep.pack_columns, "out", no_packing)
    second = load(directory, dtype=dtype, packed=cache(tmp_path, notes))
    assert notes == []
    for model in (first, second):
        assert same_bytes(logits(model), bits)
        ours, theirs = dict(model.decoder.named_parameters()), dict(expected.decoder.named_parameters())
        assert ours.keys() == theirs.keys()
        assert all(same_bytes(ours[name], theirs[name]) for name in theirs)
        assert [p.requires_grad for p in ours.values()] == [p.requires_grad for p in theirs.values()]
    (entry,) = (tmp_path / "kept").iterdir()
    kept = [name for name, *_ in packed._header(entry.read_bytes())[0]["tensors"] if name]
    assert bool(kept) == (dtype == "bfloat16")


def test_new_weights_are_packed_and_not_taken_from_the_cache(smollm2, tmp_path):
    from lockstep.serve.weights import replace_weights

    load(smollm2, packed=cache(tmp_path, []))
    model, plain = load(smollm2, packed=cache(tmp_path, [])), load(smollm2)
    state = {name: parameter.detach() * 1.5 for name, parameter in plain.decoder.named_parameters()}
    for one in (model, plain):
        replace_weights(one, state)
    assert same_bytes(logits(model), logits(plain))


def _change_weights(model: Path, kept: Path) -> None:
    """In place, of the same size, with the old modification time: what a copying tool may leave behind."""
    file = model / "model.safetensors"
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[-400:] = bytes(400)
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _flip(model: Path, kept: Path) -> None:
    data = bytearray(kept.read_bytes())
    data[packed._header(bytes(data))[1] + 5] ^= 4
    kept.write_bytes(data)


def _cut(model: Path, kept: Path) -> None:
    os.truncate(kept, kept.stat().st_size // 2)


def _empty(model: Path, kept: Path) -> None:
    os.truncate(kept, 0)


def _no_header(model: Path, kept: Path) -> None:
    kept.write_bytes(b"\xff" * 9000)


def _lost_pages(model: Path, kept: Path) -> None:
    size = kept.stat().st_size
    os.truncate(kept, packed._ALIGN * 2)
    os.truncate(kept, size)


def _another_version(model: Path, kept: Path) -> None:
    data = kept.read_bytes()
    kept.write_bytes(data.replace(b'{"made_by": {"by": "lockstep', b'{"made_by": {"by": "Lockstep', 1))


CHANGES = [
    (_change_weights, "the model's files have changed"), (_flip, "damaged"), (_cut, "damaged"), (_empty, "damaged"),
    (_no_header, "damaged"), (_lost_pages, "damaged"), (_another_version, "another Lockstep"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_what_does_not_fit_is_packed_again_with_one_line(smollm2, tmp_path, change, reason):
    load(smollm2, packed=cache(tmp_path, []))
    (kept,) = (tmp_path / "kept").iterdir()
    change(smollm2, kept)
    notes: list[str] = []
    again = load(smollm2, packed=cache(tmp_path, notes))
    assert len(notes) == 1
    assert reason in notes[0]
    assert same_bytes(logits(again), logits(load(smollm2)))
    third = load(smollm2, packed=cache(tmp_path, notes))
    assert len(notes) == 1
    assert same_bytes(logits(third), logits(again))


def _load_once(model: Path, kept: Path, answers) -> None:
    notes: list[str] = []
    found = logits(load(model, packed=cache(kept, notes)))
    answers.put((notes, found.view(torch.uint8).numpy().tobytes()))


def test_processes_that_race_see_whole_entries(smollm2, tmp_path):
    answers = context.Queue()
    racers = [context.Process(target=_load_once, args=(smollm2, tmp_path, answers)) for _ in range(3)]
    for racer in racers:
        racer.start()
    found = [answers.get(timeout=120) for _ in racers]
    for racer in racers:
        racer.join(30)
    expected = logits(load(smollm2)).view(torch.uint8).numpy().tobytes()
    assert found == [([], expected)] * 3
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".packed"]


def test_the_least_recently_used_goes_when_the_room_is_taken(tmp_path):
    models = [model_dir("smollm2", tmp_path / str(i)) for i in range(3)]
    load(models[0], packed=cache(tmp_path, []))
    (entry,) = (tmp_path / "kept").iterdir()
    limit = int(2.5 * entry.stat().st_size)
    load(models[1], packed=cache(tmp_path, [], limit=limit))
    old = sorted((tmp_path / "kept").iterdir(), key=lambda path: path == entry)
    for age, path in enumerate(old):
        os.utime(path, (1000 - age, 1000 - age))  # the first model's is the oldest, until it is used
    load(models[0], packed=cache(tmp_path, [], limit=limit))
    load(models[2], packed=cache(tmp_path, [], limit=limit))
    left = {model for _, model, _ in packed.entries(tmp_path / "kept")}
    assert left == {str(models[0]), str(models[2])}


@pytest.mark.parametrize("limit", [1, 2**60])
def test_no_room_costs_a_line(smollm2, tmp_path, limit, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**9))
    notes: list[str] = []
    load(smollm2, packed=cache(tmp_path, notes, limit=limit))
    assert len(notes) == 1
    assert "there is no room" in notes[0]
    assert not list((tmp_path / "kept").glob("*"))


def test_small_models_are_not_kept(smollm2, tmp_path):
    load(smollm2, packed=PackedCache(print, directory=tmp_path / "kept"))
    assert not (tmp_path / "kept").exists()


def test_the_commands_list_and_clear_them(smollm2, tmp_path, monkeypatch, capsys):
    from lockstep.cli.app import run

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load(smollm2, packed=PackedCache(print, directory=tmp_path / "lockstep" / "weights", small=0))
    assert run(["cache", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith(f"  {smollm2}"), "a path stands last, where it moves no column"
    assert run(["cache", "clear", "--weights"]) == 0
    assert "removed 1 entry" in capsys.readouterr().out
    assert not list(packed.entries(packed.packed_dir()))
