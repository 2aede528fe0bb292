"""A server whose engine is several processes: one that is killed, one that is told to end, one whose parent is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from lockstep.model import load
from lockstep.serve import Engine, SamplingParams, embed
from tests.serve.conftest import server
from tests.serve.running import alive, children_of, engine_of, gauge, meanwhile, wait_for
from tests.serve.test_tensor_parallel import CUT
from tests.serve.tiny import tiny_model


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model that can be cut, and other weights for it."""
    found = []
    for name, factor in (("model", 1.0), ("other", 1.5)):
        model = tiny_model(family="qwen3", **CUT)
        model.decoder.norm.weight.data *= factor
        model.save(path := tmp_path_factory.mktemp("tp") / name)
        found.append(str(path))
    return found


PROMPT, PARAMS = [5] * 130, SamplingParams(temperature=1.0, max_tokens=8, seed=1, logprobs=2)
TEXTS = [[5, 6, 7], [8] * 70]


def served(url: str) -> tuple:
    """Tokens, log-probabilities and embeddings, over HTTP."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "seed": 1, "logprobs": 2, "return_token_ids": True}
    (choice,) = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
    vectors = httpx.post(f"{url}/v1/embeddings", json={"model": "tiny", "input": TEXTS}, timeout=60).json()["data"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], [vector["embedding"] for vector in vectors]


def here(directory: str) -> tuple:
    """The same of one process."""
    model = load(directory)
    (told,) = Engine(model).generate([PROMPT], PARAMS)
    return list(told.token_ids), list(told.logprobs), [vector.tolist() for vector in embed(model, TEXTS)]


def test_two_processes_serve_the_bytes_of_one_outlive_a_kill_and_leave_nothing(directories):
    """kill -9 of a rank: errors within 5 s, health stays up, /ready tells, the group starts again with the weights that
    were set. kill -9 of the server: nothing is left."""
    model, other = directories
    with server(model, tp=2, weight_updates="true", drafts=2) as (url, process):
        assert served(url) == here(model)
        httpx.post(f"{url}/v1/weights", json={"path": other}).raise_for_status()
        assert served(url) == here(other) != here(model)
        engine = engine_of(process)
        (rank,) = children_of(engine)
        with meanwhile(url, 2) as answers:
            begun = time.monotonic()
            os.kill(rank, signal.SIGKILL)
        assert time.monotonic() - begun < 5
        assert [answer.status_code for answer in answers] == [503, 503]
        assert "rank 1 of 2 was killed by SIGKILL" in answers[0].json()["error"]["message"]
        assert httpx.get(f"{url}/ready").status_code == 503
        assert httpx.get(f"{url}/health").status_code == 200
        wait_for(lambda: not alive(engine) and not alive(rank))
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 60)
        assert served(url) == here(other)
        last = [engine_of(process), *children_of(engine_of(process))]
        assert len(last) == 2
        os.kill(last[1], signal.SIGSTOP)  # not even what is stopped
        process.kill()
        wait_for(lambda: not any(alive(pid) for pid in last))


@pytest.mark.slow
def test_replicas_of_two_processes_finish_what_runs_and_leave_nothing(directories):
    """pytest -m slow tests/serve/test_tensor_parallel_server.py"""
    with server(directories[0], tp=2, replicas=2) as (url, process):
        assert gauge(url, "lockstep:replicas_ready") == 2
        engines = children_of(process.pid)
        ranks = [rank for engine in engines for rank in children_of(engine)]
        assert (len(engines), len(ranks)) == (2, 2)
        with meanwhile(url, 1, max_tokens=100) as answers:
            process.send_signal(signal.SIGTERM)
        assert answers[0].status_code == 200
        assert process.wait(20) == 0
        wait_for(lambda: not any(alive(pid) for pid in [*engines, *ranks]))


@pytest.mark.slow
def test_generate_on_two_processes_writes_what_one_gives(directories):
    """pytest -m slow tests/serve/test_tensor_parallel_server.py"""
    command = [sys.executable, "-m", "lockstep", "generate", directories[0], "-p", "the quick", "--json", "--tp", "2"]
    command += ["--logprobs", "--seed", "1", "--temperature", "1", "--max-tokens", "9"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=9, logprobs=0)
    (right,) = Engine(load(directories[0])).generate("the quick", params)
    assert (told["token_ids"], told["logprobs"]) == (list(right.token_ids), list(right.logprobs))
