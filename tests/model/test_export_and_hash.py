"""Directories out: whole or not at all, never over somebody's files; sharding and layout do not matter to the hash."""

import json
import resource

import pytest
import torch
from safetensors.torch import load_file, save_file

import lockstep.model.files
from lockstep.cli.app import run
from lockstep.errors import LockstepError
from lockstep.model import load
from lockstep.model.export import save_model
from lockstep.model.files import MARKER
from lockstep.model.hash import hash_path
from tests.model.tiny import same_bytes, tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("source")
    tiny("smollm2").save_pretrained(directory)
    return directory


@pytest.fixture
def model(source):
    return load(source, dtype="float32")


def test_sharded_export_loads_here_and_in_transformers(model, tmp_path):
    from transformers import AutoModelForCausalLM

    save_model(model, tmp_path / "one")
    save_model(model, tmp_path / "many", shard_bytes=20_000)
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 2
    back = load(tmp_path / "many", dtype="float32")
    for (_, a), (_, b) in zip(back.decoder.named_parameters(), model.decoder.named_parameters(), strict=True):
        assert same_bytes(a.detach(), b.detach())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "many", dtype=torch.float32)
    assert same_bytes(theirs.model.embed_tokens.weight.detach(), model.decoder.embed.weight.detach())
    assert hash_path(tmp_path / "one") == hash_path(tmp_path / "many")


def test_hash_depends_on_weights_names_and_dtype_alone(model, source, tmp_path):
    model.save(tmp_path / "a")
    assert hash_path(tmp_path / "a") == hash_path(source)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    file = tmp_path / "a" / "model.safetensors"
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"other": "metadata"})
    assert hash_path(tmp_path / "a") == hash_path(source), "a tied head counts once"
    load(source, dtype="bfloat16").save(tmp_path / "b")
    assert hash_path(tmp_path / "b") != hash_path(source), "dtype"
    tensors["model.norm.weight"][0] = torch.nextafter(tensors["model.norm.weight"][0], torch.tensor(9.0))
    save_file(tensors, file)
    assert hash_path(tmp_path / "a") != hash_path(source), "one bit"


def test_existing_targets(model, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    model.save(empty)
    model.save(empty)  # an earlier export is replaced
    assert load(empty).config == model.config

    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    with pytest.raises(LockstepError, match=r"precious is not empty.*--force"):
        model.save(precious)
    assert (precious / "thesis.txt").read_text() == "years"
    model.save(precious, force=True)
    assert not (precious / "thesis.txt").exists()

    (tmp_path / "file").write_text("")
    with pytest.raises(LockstepError, match=r"is a file"):
        model.save(tmp_path / "file", force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "precious"], "nothing temporary is left"


def test_a_failed_write_changes_nothing(model, tmp_path, monkeypatch):
    model.save(tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # the kernel refuses any larger file
    try:
        with pytest.raises(LockstepError, match=r"cannot write .*out.*Nothing was changed"):
            model.save(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lockstep.model.files, "_rename", full)
    with pytest.raises(LockstepError, match=r"the disk is full: free some space"):
        model.save(tmp_path / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_loading_is_a_view_and_training_cannot_reach_the_file(model, source):
    """Weights that need no conversion are the mapped file; the mapping is private, so writing stays in memory."""
    before = (source / "model.safetensors").read_bytes()
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.zero_()
    assert (source / "model.safetensors").read_bytes() == before
    shared = {p.untyped_storage().data_ptr() // 2**24 for p in model.decoder.parameters()}
    assert len(shared) <= 2, "all parameters lie in one mapping"


def test_command_line(source, tmp_path, capsys):
    assert run(["export", str(source), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert (tmp_path / "out" / MARKER).is_file()
    capsys.readouterr()
    assert run(["hash", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == hash_path(source)
    assert run(["hash", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such file or directory" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
