"""Building the extension: once for two processes, never stale, the same bits from every instruction set."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError
from lockstep.ops import build
from lockstep.ops.device_class import instruction_sets
from tests.ops.fingerprint import fingerprint, fingerprint_of
from tests.processes import answer, context

SIMDE = Path("/usr/include/simde")


def _built(cache: Path, ready: Barrier) -> tuple[int, Path]:
    """How many builds this process made of a small source, and where the library is."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    build.CSRC = cache / "csrc"
    builds, real = [], build._build

    def counted(*arguments: Any) -> None:
        builds.append(arguments)
        time.sleep(0.5)  # the other one comes to the lock meanwhile
        real(*arguments)

    build._build = counted
    ready.wait(60)
    path = build.library("plain")
    return len(builds), path


def test_two_at_once_build_once(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.cpp").write_text("int a() { return 1; }\n")
    ready = context.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: answer(_built, tmp_path, ready), range(2)))
    assert sorted(builds for builds, _ in found) == [0, 1]
    assert found[0][1] == found[1][1]
    assert found[0][1].exists()
    assert not [p.name for p in (tmp_path / "lockstep" / "ext").iterdir() if p.name.startswith("build-")]


@pytest.mark.timeout(600)
def test_the_plain_build_gives_the_bits_of_the_best() -> None:
    """Compiled with -O1, in a third of the time: what the sources say leaves the optimizer no choice of bits."""
    plain = {"amx-bf16": "plain-tiles", "avx512-bf16": "plain-pairs"}.get(build.best_isa(), "plain")
    assert answer(fingerprint_of, plain, "-O1") == fingerprint(build.best_isa())


CLASSES = {
    "cpu-fma": ["avx2", "plain", "avx512", "avx512-on-avx2"],
    "cpu-amx-bf16": ["avx2-tiles", "plain-tiles", "amx-bf16", "amx-bf16-on-avx2"],
    "cpu-avx512-bf16": ["avx2-pairs", "plain-pairs", "avx512-bf16", "avx512-bf16-on-avx2"],
}
"""The builds that give one set of bits; the first with what most processors have."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.skipif("avx2" not in instruction_sets(), reason="AVX-512 is emulated on AVX2, which is not here")
@pytest.mark.skipif(not SIMDE.exists(), reason="no SIMDe on this machine (Debian: apt install libsimde-dev)")
def test_every_build_of_a_class_gives_its_bits_as_it_is_shipped(name: str) -> None:
    """pytest -m slow tests/ops/test_build.py"""
    needs = {"avx512": "avx512_f", "avx512-bf16": "avx512_bf16", "amx-bf16": "amx_bf16"}
    runs = [isa for isa in CLASSES[name] if needs.get(isa, "avx2") in instruction_sets()]
    found = {isa: answer(fingerprint_of, isa) for isa in runs}
    assert len(set(found.values())) == 1, found


def test_no_compiler_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build.find_compiler.cache_clear()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        with pytest.raises(LockstepError, match=r"apt install g\+\+.*--numerics fast.*train.numerics=fast"):
            build.find_compiler()
        assert not build.is_built("plain")
    finally:
        build.find_compiler.cache_clear()


def test_a_failing_build_says_why_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "broken.cpp").write_text("int x = no_such_name;\n")
    monkeypatch.setattr(build, "CSRC", tmp_path / "csrc")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(LockstepError, match="no_such_name"):
        build.library("plain")
    assert [p.suffix for p in (tmp_path / "cache" / "lockstep" / "ext").iterdir()] == [".lock"]


def test_an_edit_compiles_what_includes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    csrc, kept = tmp_path / "csrc", tmp_path / "cache" / "lockstep" / "objects"
    csrc.mkdir()
    (csrc / "shared.h").write_text("int shared();\n")
    (csrc / "a.cpp").write_text("int a() { return 1; }\n")
    (csrc / "b.cpp").write_text('#include "shared.h"\nint b() { return 1; }\n')
    monkeypatch.setattr(build, "CSRC", csrc)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.library("plain")
    first = {p.name for p in kept.iterdir()}
    (csrc / "a.cpp").write_text("int a() { return 2; }\n")
    assert build.library("plain").exists()
    second = {p.name for p in kept.iterdir()} - first
    assert [name.rsplit("-", 1)[0] for name in second] == ["a"]
    (csrc / "shared.h").write_text("long shared();\n")
    build.library("plain")
    third = {p.name for p in kept.iterdir()} - first - second
    assert [name.rsplit("-", 1)[0] for name in third] == ["b"]


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        LockstepError, match=r"cannot be put into .*/file/lockstep/ext: Not a directory.*XDG_CACHE_HOME"
    ):
        build.library("plain")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without a home directory
    with pytest.raises(LockstepError, match=r"no home directory.*set HOME or XDG_CACHE_HOME"):
        build.library("plain")


def test_a_changed_source_has_another_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = build.find_compiler()
    before = build._key(compiler, "plain")
    (tmp_path / "other.cpp").write_text("// changed\n")
    monkeypatch.setattr(build, "CSRC", tmp_path)
    assert build._key(compiler, "plain") != before


def test_builds_share_the_objects_that_cannot_differ(tmp_path: Path) -> None:
    compiler, source = build.find_compiler(), tmp_path / "a.cpp"
    builds = ("plain", "avx2", "avx2-pairs")
    for text, different in (("", 1), ("#if __AVX2__\n", 2), ("#if __AVX2__ && LOCKSTEP_BF16_PAIRS\n", 3)):
        source.write_text(text)
        assert len({build._key(compiler, isa, source) for isa in builds}) == different
