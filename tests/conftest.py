"""What all tests share: one thread per worker when several run, repeatable property tests, a compile cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch is imported, and for child processes too: two workers with two threads each would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

import lockstep  # noqa: F401 - before any test imports torch, as in a user's program: it sets how threads wait

if TYPE_CHECKING:
    from lockstep.compile import Cache

# No deadline: a busy machine is no failure. Derandomised: a red run is red again.
settings.register_profile("lockstep", deadline=None, derandomize=True, database=None)
settings.load_profile("lockstep")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device-class", choices=["cpu-amx-bf16", "cpu-avx512-bf16"], help="take this machine for one of that class"
    )


def pytest_configure(config: pytest.Config) -> None:
    if name := config.getoption("--device-class"):
        from tests.another_class import sitecustomize

        sitecustomize.take_over(name)
        found = [str(Path(sitecustomize.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(found)  # for processes that tests start


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """A compile cache that is empty when the tests begin, for those which compile the same blocks in all workers."""
    from lockstep.compile import Cache

    run = tmp_path_factory.getbasetemp()
    return Cache((run.parent if "PYTEST_XDIST_WORKER" in os.environ else run) / "programs")
