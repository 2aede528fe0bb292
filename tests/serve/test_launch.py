"""What is started early, and PyTorch without what tracing needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep.serve import launch
from lockstep.serve.launch import launch_early


@pytest.mark.parametrize(
    ("arguments", "certain"),
    [
        ("serve smollm2-135m", True),
        ("--debug serve smollm2-135m --port 0 --set serve.max_running=4", True),
        ("serve", False),
        ("chat serve", False),
        ("serve DIR --tp 2", False),
        ("serve DIR --replicas=2", False),
        ("serve DIR --set serve.tp=2", False),
        ("serve DIR --set=serve.replicas=2", False),
        ("serve DIR -c run.yaml", False),
        ("serve DIR --help", False),
        ("", False),
    ],
)
def test_an_engine_is_started_early_where_it_is_certain_that_there_is_one(arguments, certain, monkeypatch):
    monkeypatch.setattr(launch, "launch", lambda: "an engine")
    assert launch_early(arguments.split()) == ("an engine" if certain else None)


def test_lean_pytorch_computes_and_traces_once_it_has_to():
    """In a process of its own: the bits of a model do not change, and a graph is captured after the import."""
    code = """
from lockstep.serve.lean import import_torch, preload
preload()
import_torch()
import sys, torch
assert "torch._meta_registrations" not in sys.modules and "torch._refs" not in sys.modules
x = torch.ones(3, 4).bfloat16()
print((x @ x.T).softmax(-1).sum().item(), torch.empty(2, device="meta").shape)
import torch._meta_registrations
from torch.fx.experimental.proxy_tensor import make_fx
with torch.device("meta"):
    graph = make_fx(lambda a: torch.linalg.cholesky(a @ a.T), tracing_mode="fake")(torch.empty(3, 3))
print(sorted({n.target.__name__ for n in graph.graph.nodes if n.op == "call_function"}))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == "3.0 torch.Size([2])"
    assert "mm.default" in run.stdout
