"""What the compiler made of the micro-kernel: every sum of a tile in a register for as long as its loop runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.ops import build
from tests.ops.inner_loops import Loop, machine_code, micro_kernel

pytestmark = pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump to read machine code with")


def compiled(isa: str, folder: Path) -> list[Loop]:
    target = folder / "products.o"
    build._compile_one(build.find_compiler(), isa, folder, build.CSRC / "gemm.cpp", target)
    return micro_kernel(target)


@pytest.mark.skipif(build.best_isa() == "plain", reason="the plain build has no vector registers")
def test_no_vector_of_the_machines_own_build_lies_on_the_stack() -> None:
    isa, source = build.best_isa(), build.CSRC / "gemm.cpp"
    whole = build.library(isa)
    kept = build.cache_dir().parent / "objects" / f"gemm-{build._key(build.find_compiler(), isa, source)}.o"
    loops = micro_kernel(kept if kept.exists() else whole)
    assert len(loops) >= 4, "of both dtypes, more than one height"
    assert not [loop for loop in loops if loop.on_stack]


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx512-bf16", "avx512"])
def test_no_vector_of_an_avx512_build_lies_on_the_stack(isa: str, tmp_path: Path) -> None:
    """pytest -m slow tests/ops/test_inner_loops.py"""
    loops = compiled(isa, tmp_path)
    assert not [loop for loop in loops if loop.on_stack]
    widest = max(loops, key=lambda loop: loop.multiply_adds)
    assert (widest.multiply_adds, widest.loads) == (24, 10), "six rows, four panels"
    assert any("vdpbf16ps" in line for loop in loops for line in loop.instructions) == (isa == "avx512-bf16")


@pytest.mark.slow
def test_the_build_for_tiles_reads_each_once_and_sets_them_up_once(tmp_path: Path) -> None:
    """pytest -m slow tests/ops/test_inner_loops.py"""
    loops = [loop for loop in compiled("amx-bf16", tmp_path) if loop.tile_loads]
    shapes = sorted((loop.multiply_adds, loop.tile_loads, loop.on_stack) for loop in loops)
    assert shapes == [(1, 2, 0), (2, 3, 0), (2, 3, 0), (4, 4, 0)], "one or two tiles of rows by one or two panels"
    code = machine_code(tmp_path / "products.o")
    assert code.count("tdpbf16ps") == 9, "in no other loop"
    assert 0 < code.count("ldtilecfg") < code.count("tilerelease"), "released at the end, and where a task throws"
