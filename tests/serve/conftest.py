"""The tiny model, and a real server process on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.serve.tiny import tiny_model


@pytest.fixture(scope="session")
def model():
    torch.set_num_threads(1)  # the tests share the machine: waiting threads cost more than they give
    return tiny_model()


def first_url(process: subprocess.Popen[str]) -> str:
    """Wait for the line that says where it listens."""
    said = []
    for line in process.stdout:
        said.append(line)
        if found := re.search(r"at (http://\S+)/v1", line):
            return found[1]
    raise AssertionError(f"the server ended and said {said}")


@contextmanager
def server(**settings: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server process of its own: (its URL, the process)."""
    arguments = [f"{key}={value}" for key, value in {"port": 0, "kv_memory": "64MiB", **settings}.items()]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.serve.tiny", *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield first_url(process), process
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    with server() as (address, _):
        yield address
