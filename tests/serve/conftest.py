"""The tiny model, and a real server process on it."""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from starlette.testclient import TestClient

from lockstep.config.serve import ServeConfig
from lockstep.model.model import Model
from lockstep.serve.api import create_app
from lockstep.serve.replicas import Replicas
from lockstep.serve.spec import engine_spec
from tests.serve.knowing import thinking
from tests.serve.running import wait_for
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


@cache
def saved() -> str:
    """The tiny model as a directory, for as long as the tests run."""
    directory = tempfile.TemporaryDirectory(prefix="lockstep-tiny-")
    atexit.register(directory.cleanup)
    tiny_model().save(f"{directory.name}/tiny")
    return f"{directory.name}/tiny"


@contextmanager
def server(directory: str | None = None, **settings: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server of its own, whose engine checks its pages after every step: (its URL, the process).

    directory: the model; by default the tiny one.
    """
    settings = {"kv_memory": "64MiB", **settings}
    command = [sys.executable, "-m", "lockstep", "serve", directory or saved(), "--model-name", "tiny", "--port", "0"]
    command += [argument for key, value in settings.items() for argument in ("--set", f"serve.{key}={value}")]
    process = subprocess.Popen(
        [*command, "--log-level", "debug"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield first_url(process), process
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    with server() as (address, _):
        yield address


@pytest.fixture(scope="session")
def knowing(model, tmp_path_factory) -> Iterator[TestClient]:
    """The application around an engine process of its own, on the tiny model with a template that knows tools and
    thoughts."""
    directory = tmp_path_factory.mktemp("knowing") / "model"
    Model(model.decoder, thinking(model.tokenizer), model.ops, model.dtype).save(directory)
    with TestClient(create_app(Replicas(engine_spec(str(directory), ServeConfig())), "tiny", ServeConfig())) as client:
        wait_for(lambda: client.get("/ready").status_code == 200, 60)
        yield client
