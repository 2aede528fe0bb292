"""The team of threads that kernels share their tasks in, checked from C++: `team_checks.cpp`."""

import subprocess
from pathlib import Path

import pytest

from lockstep.ops.build import CSRC, find_compiler

CHECKS = ("counts", "numbers_of_threads", "many_callers", "nested", "thrown", "forked")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("team") / "team_checks"
    sources = [Path(__file__).with_name("team_checks.cpp"), CSRC / "team.cpp"]
    flags = ["-std=c++20", "-fopenmp", "-pthread", f"-I{CSRC}"]
    subprocess.run([find_compiler().path, *flags, *map(str, sources), "-o", str(built)], check=True)
    return built


@pytest.mark.parametrize("name", CHECKS)
def test_team(program: Path, name: str) -> None:
    run = subprocess.run([str(program), name], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "")
