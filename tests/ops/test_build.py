"""Building the extension: once for two processes, never stale, the same bits from every instruction set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.ops import build

# Runs every kernel on odd sizes (tails in every loop) and prints one hash over all results.
FINGERPRINT = """
import hashlib, sys, torch
from lockstep.ops import build
build.load(sys.argv[1])
from lockstep.ops.operators import _CONTRACT as ops
from lockstep.ops import Packed
torch.manual_seed(0)
digest = hashlib.sha256()
for dtype in (torch.float32, torch.bfloat16):
    def make(*shape): return torch.randn(*shape).to(dtype).requires_grad_()
    x, w, b = make(101, 77), make(53, 77), make(53)
    q, k, v = make(101, 6, 32), make(101, 2, 32), make(101, 2, 32)
    table = torch.randn(101, 16, 2)
    batch = Packed.of([70, 31])
    outputs = [
        ops.linear(x, w, b), ops.linear(x.detach(), ops.pack(w, dtype)), ops.rms_norm(x, make(77), 1e-5, 1.0),
        ops.gated(x, make(101, 77) * 20, "silu"), ops.gated(make(101, 77) * 3, x, "gelu_tanh"),
        ops.rope(q, batch.positions, table), ops.attention(q, k, v, batch, 0.5, 40),
        ops.attention(q * 30, k, v, batch, 0.5), ops.log_softmax(x.detach().float() * 9),
        ops.embedding(torch.arange(101) % 53, w, dtype, 1.5),
        ops.linear_cross_entropy(x, w, torch.arange(101) % 54 - 1, torch.rand(101), 0.1)[0],
    ]
    packed = [ops.pack(w[:n].detach(), dtype) for n in (53, 20, 17)]
    for rows in (1, 2, 3, 7, 8, 9, 10, 13):  # the ways of cutting few rows into tiles
        part = x.detach()[:rows]
        outputs += torch.ops.lockstep.gemm_three(part, *(p.panels for p in packed), 53, 20, 17, b.detach(), None, None)
        outputs.append(torch.ops.lockstep.gemm_add(torch.randn(rows, 20), part, packed[1].panels))
    sum(y.float().square().sum() for y in outputs if y.requires_grad).backward()
    for t in [*outputs, x.grad, w.grad, b.grad, q.grad, k.grad, v.grad]:
        digest.update(t.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


def start(isa: str, cache: Path | None) -> subprocess.Popen[str]:
    environment = dict(os.environ) if cache is None else {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-c", FINGERPRINT, isa]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fingerprint(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.strip(), err


@pytest.mark.timeout(600)
def test_two_at_once_build_once_and_every_build_gives_the_same_bits(tmp_path: Path) -> None:
    first, second = start("plain", tmp_path), start("plain", tmp_path)
    (plain, said), (again, also_said) = fingerprint(first), fingerprint(second)
    assert (said + also_said).count("Building the plain kernels") == 1
    best, _ = fingerprint(start(build.best_isa(), None))
    assert plain == again == best
    left = [p.name for p in (tmp_path / "lockstep" / "ext").iterdir() if p.name.startswith("build-")]
    assert left == []


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
    assert [name.rsplit("-", 1)[0] for name in second] == ["plain-a"]
    (csrc / "shared.h").write_text("long shared();\n")
    build.library("plain")
    third = {p.name for p in kept.iterdir()} - first - second
    assert [name.rsplit("-", 1)[0] for name in third] == ["plain-b"]


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
    assert build._key(compiler, "plain") != build._key(compiler, "avx2")
