"""Tiny runs: a two-layer model over a small text, seconds at most."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import tiny_tree

from lockstep.config import Config
from lockstep.config.check import check


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text: a module of the standard library."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()[:20_000])
    return path


@pytest.fixture
def tiny(text: Path, tmp_path: Path) -> Callable[..., Config]:
    """A tiny configuration that trains in ``tmp_path / "run"``; keyword arguments are sections."""

    def make(out: Path | None = None, **sections: dict[str, Any]) -> Config:
        return check(Config, tiny_tree(text, out or tmp_path / "run", **sections), "test")

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
