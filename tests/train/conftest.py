"""Tiny runs: a two-layer model over a small text, seconds at most."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import Config
from lockstep.config.check import check

MODEL = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2,
    "num_kv_heads": 1, "max_positions": 128, "tie_embeddings": True,
}  # fmt: skip


def tiny_tree(text: Path, out: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration as a mapping; sections are merged over it."""
    tree: dict[str, Any] = {
        "model": MODEL,
        "data": {"sources": [str(text)], "seq_len": 32, "held_out": 0.1},
        "schedule": {"warmup_steps": 2},
        "train": {
            "out": str(out), "steps": 6, "micro_batch": 2, "micro_batches": 3, "dtype": "float32",
            "tensorboard": False, "save_every": 0, "eval_every": 0,
        },
    }  # fmt: skip
    return {name: {**tree.get(name, {}), **sections.get(name, {})} for name in tree.keys() | sections.keys()}


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text: a module of the standard library."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()[:40_000])
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
