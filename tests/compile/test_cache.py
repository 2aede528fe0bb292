"""The compile cache: a second process captures nothing; nothing is loaded across a mismatch; races are safe."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch

from lockstep import sources
from lockstep.compile import Blockwise, Cache, Compiler, cache, compiler
from lockstep.compile.cache import entries
from lockstep.compile.halves import halves_from
from lockstep.ops import operators
from tests.compile.models import batch, decoder, differentiate, eager, same
from tests.processes import answer, context

OPS = operators("bitwise")


def compiled(directory, notes, dtype=torch.float32, **sizes):
    compiler = Compiler("O1", cache=Cache(directory), note=notes.append)
    return Blockwise(decoder("llama", **sizes), OPS, dtype, compiler, 64), compiler


def test_an_entry_gives_the_same_recipes_and_the_same_bytes(tmp_path):
    notes: list[str] = []
    first, cold = compiled(tmp_path, notes)
    second, warm = compiled(tmp_path, notes)
    assert [r.cached for r in cold.reports] == [False]
    assert [r.cached for r in warm.reports] == [True]
    assert cold._done == warm._done
    tokens, targets, packed, weights = batch([20, 30])
    found = differentiate(second.decoder, OPS, second(tokens, packed), targets, weights)
    assert same(found, eager(first.decoder, OPS, torch.float32, [20, 30]))
    assert not notes


@pytest.mark.parametrize("change", [{"dtype": torch.bfloat16}, {"hidden_size": 32}, {"norm_eps": 1e-3}])
def test_another_dtype_shape_or_option_is_another_entry(tmp_path, change):
    notes: list[str] = []
    compiled(tmp_path, notes)
    _, compiler = compiled(tmp_path, notes, **change)
    assert not compiler.reports[0].cached
    assert not notes
    assert len(list(entries(tmp_path))) == 2


def test_an_operator_of_the_callers_own_is_compiled_and_not_kept(tmp_path):
    """What it did is in the recipe, and no key could tell it from ours."""
    changed = replace(OPS, gated=lambda gate, up, name: 2 * OPS.gated(gate, up, name))
    mine = Blockwise(decoder("llama"), changed, torch.float32, Compiler("O1", cache=Cache(tmp_path)), 64)
    assert not list(entries(tmp_path))
    ours, _ = compiled(tmp_path, [])
    tokens, _, packed, _ = batch([20, 30])
    assert not same([mine(tokens, packed)], [ours(tokens, packed)])
    assert same([mine(tokens, packed)], [mine.decoder(changed, tokens, packed, dtype=torch.float32)])


def test_other_passes_are_another_entry(tmp_path):
    compiled(tmp_path, [])
    compiler = Compiler("O1", disable=["dead-code"], cache=Cache(tmp_path))
    Blockwise(decoder("llama"), OPS, torch.float32, compiler, 64)
    assert not compiler.reports[0].cached


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _flip(text: str) -> str:
    at = text.rindex("::")  # within an operator's name
    return text[:at] + ":;" + text[at + 2 :]


def _another_tree(text: str) -> str:
    """A whole entry, sum and all, that holds no recipes."""
    head, body = json.loads(text.partition("\n")[0]), '{"forward": []}'
    return json.dumps({**head, "sha256": hashlib.sha256(body.encode()).hexdigest()}) + "\n" + body


DAMAGES = {
    "cut": _cut, "flipped": _flip, "empty": lambda text: "", "another object": lambda text: "{}\n{}",
    "no object": lambda text: "[1]\n[]", "no JSON": lambda text: "\x00\xff" + text, "another tree": _another_tree,
    "deep": lambda text: "[" * 200_000, "no text": lambda text: b"\xff\xfe" + text.encode(),
    "one line": lambda text: text.partition("\n")[0],
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_compiled_again_with_one_line(tmp_path, damage):
    notes: list[str] = []
    compiled(tmp_path, notes)
    (entry, *_), *_ = entries(tmp_path)
    made = DAMAGES[damage](entry.read_text())
    entry.write_bytes(made if isinstance(made, bytes) else made.encode())
    assert len(list(entries(tmp_path))) == 1
    _, compiler = compiled(tmp_path, notes)
    assert not compiler.reports[0].cached
    assert len(notes) == 1
    assert "damaged; compiling again" in notes[0]
    _, compiler = compiled(tmp_path, notes)
    assert compiler.reports[0].cached, "it was written anew"


def test_an_entry_of_other_sources_is_compiled_again_with_one_line(tmp_path, monkeypatch):
    notes: list[str] = []
    compiled(tmp_path, notes)
    monkeypatch.setattr(cache, "made_by", lambda *rooms: "lockstep 9.9, sources 123")
    _, compiler = compiled(tmp_path, notes)
    assert not compiler.reports[0].cached
    assert len(notes) == 1
    assert "other sources" in notes[0]


@pytest.mark.parametrize("what", ["torch", "device"])
def test_another_torch_or_device_class_is_another_entry(tmp_path, monkeypatch, what):
    compiled(tmp_path, [])
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9.9")
    else:
        monkeypatch.setattr(cache, "device_class", lambda: "cpu-other")
    notes: list[str] = []
    assert not compiled(tmp_path, notes)[1].reports[0].cached
    assert not notes


def test_the_sources_of_every_room_count(monkeypatch, tmp_path):
    rooms = ("compile", "memory", "model", "ops")
    for room in rooms:
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").write_text("x = 1")
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "sources.py"))
    sources.made_by.cache_clear()
    found = {sources.made_by(*cache._SOURCES)}
    for room in rooms:
        (tmp_path / room / "a.py").write_text("x = 2")
        sources.made_by.cache_clear()
        found.add(sources.made_by(*cache._SOURCES))
    sources.made_by.cache_clear()
    assert len(found) == 5


def test_a_directory_that_cannot_be_written_costs_a_line(tmp_path):
    (tmp_path / "file").write_text("")
    notes: list[str] = []
    compiled(tmp_path / "file", notes)
    (note,) = notes
    assert re.fullmatch(r"compiled programs are not kept in .*file: (File exists|Not a directory)", note)


def test_a_full_disk_costs_a_line_and_leaves_nothing(tmp_path, monkeypatch):
    notes: list[str] = []

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    compiled(tmp_path, notes)
    assert notes == [f"compiled programs are not kept in {tmp_path}: No space left on device"]
    assert not list(tmp_path.iterdir())


def test_a_folder_in_the_place_of_an_entry_gives_way(tmp_path):
    notes: list[str] = []
    compiled(tmp_path, notes)
    (entry, *_), *_ = entries(tmp_path)
    entry.unlink()
    (entry / "within").mkdir(parents=True)
    _, compiler = compiled(tmp_path, notes)
    assert not compiler.reports[0].cached
    assert len(notes) == 1
    assert "cannot be read (Is a directory); compiling again" in notes[0]
    assert compiled(tmp_path, notes)[1].reports[0].cached


def _race(directory: str, ready: Barrier) -> None:
    halves = halves_from(json.loads((Path(directory) / "source").read_text()))
    ready.wait(120)
    shared = Cache(Path(directory))
    for _ in range(30):
        shared.store('[["block"]]', halves, pytest.fail)
        assert shared.load('[["block"]]', pytest.fail) == halves


def test_processes_that_race_see_whole_entries(tmp_path):
    _, compiler = compiled(tmp_path / "other", [])
    ((_, halves),) = compiler._done
    (tmp_path / "source").write_text(json.dumps(halves.tree()))
    ready = context.Barrier(2)
    racers = [context.Process(target=_race, args=(str(tmp_path), ready)) for _ in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0, 0]
    assert not list(tmp_path.glob("new-*"))


def _cached(directory: Path) -> tuple[list[bool], list[str]]:
    """Whether the cache had each stage, and what was said; to capture anything is an error."""
    compiler.capture = lambda *_: pytest.fail("everything is in the cache")
    notes: list[str] = []
    return [report.cached for report in compiled(directory, notes)[1].reports], notes


def test_a_second_process_captures_nothing(tmp_path):
    _, first = compiled(tmp_path, [])
    assert [report.cached for report in first.reports] == [False]
    assert answer(_cached, tmp_path) == ([True], [])


def test_the_commands_list_and_clear(tmp_path, monkeypatch, capsys):
    from lockstep.cli.app import run

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for dtype in (torch.float32, torch.bfloat16):
        compiled(tmp_path / "lockstep" / "programs", [], dtype)
    for number in range(3):
        (tmp_path / "lockstep" / "ext" / f"avx2-{number}").mkdir(parents=True)
    (tmp_path / "lockstep" / "ext" / "build-half").mkdir()
    assert run(["cache", "ls"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"^ +3 entries .* newest .*  avx2$", listed, re.MULTILINE)
    assert re.search(r"^ +2 entries .* newest .*  block$", listed, re.MULTILINE)
    assert listed.count("\n") == 6, "four kinds of things, and a line for each kind of entry"
    assert run(["cache", "ls", "--each"]) == 0
    listed = capsys.readouterr().out
    assert all(f"avx2-{number}" in listed for number in range(3))
    assert all(path.stem in listed for path, *_ in entries(tmp_path / "lockstep" / "programs"))
    with monkeypatch.context() as refused:
        refused.setattr("shutil.rmtree", lambda *_, **__: None)
        assert run(["cache", "clear", "--programs"]) == 2
        told = capsys.readouterr()
    assert told.out.startswith("removed 0 entries")
    assert "2 entries of" in told.err
    assert run(["cache", "clear", "--programs"]) == 0
    assert "removed 2 entries" in capsys.readouterr().out
    assert not list(entries(tmp_path / "lockstep" / "programs"))
    assert (tmp_path / "lockstep" / "ext" / "avx2-0").exists()
    assert run(["cache", "clear"]) == 0
    assert not (tmp_path / "lockstep" / "ext").exists()
