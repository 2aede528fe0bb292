"""A server from start to end: its port, its key, its limits, clients that leave, signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from starlette.testclient import TestClient

from lockstep.config.serve import ServeConfig
from lockstep.errors import LockstepError
from lockstep.serve.api import create_app
from lockstep.serve.port import bind
from lockstep.serve.replicas import Replicas
from lockstep.serve.spec import engine_spec
from lockstep.serve.state import QueueFull
from tests.serve.conftest import saved, server
from tests.serve.running import LONG, alive, engine_of, gauge, meanwhile, wait_for
from tests.serve.tiny import tiny_model


@pytest.fixture(scope="module")
def guarded():
    """A server with a key, a small body limit, a short queue and a deadline."""
    with server(api_key="secret", max_body="2KiB", max_queue=2, max_running=2, request_timeout=20) as (url, _):
        yield url, {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def replaceable():
    """A server whose weights may be replaced, and whose structures must compile soon."""
    with server(weight_updates="true", structure_seconds=0.5) as (url, process):
        yield url, process


def test_the_key_is_asked_for_where_it_matters(guarded):
    url, key = guarded
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "Bearer é"}):
        answer = httpx.get(f"{url}/v1/models", headers={k: v.encode() for k, v in headers.items()})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{url}/v1/models", headers=key).status_code == 200
    assert httpx.get(f"{url}/health").status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="no", max_retries=0).models.list()


def test_each_client_has_a_key_and_it_decides_whose_share_is_taken(monkeypatch):
    given = []

    async def submit(self, prompt, params, *, client="", **more):
        given.append(client)
        raise QueueFull("full")

    monkeypatch.setattr(Replicas, "submit", submit)
    config = ServeConfig(api_key="shared", api_keys={"alice": "a", "bob": "b"}, shares={"alice": 2.0})
    asked = {"model": "tiny", "prompt": [1], "user": "mallory"}
    with TestClient(create_app(Replicas(engine_spec(saved(), config)), "tiny", config)) as client:
        while client.get("/ready").status_code != 200:
            time.sleep(0.05)
        for key, status in (("a", 429), ("b", 429), ("shared", 429), ("c", 401), ("", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert client.post("/v1/completions", json=asked, headers=headers).status_code == status
    assert given == ["alice", "bob", "mallory"]


def test_other_pages_may_ask_only_where_it_is_said():
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    for origins, status in ([], 401), (["https://app.example"], 200), (["https://other.example"], 400):
        config = ServeConfig(cors_origins=origins, api_key="secret")
        client = TestClient(create_app(Replicas(engine_spec("tiny", config)), "tiny", config))
        assert client.options("/v1/chat/completions", headers=asked).status_code == status
        told = client.get("/v1/models", headers=asked).headers.get("access-control-allow-origin")
        assert told == ("https://app.example" if status == 200 else None)


def test_bodies_have_a_limit(guarded):
    url, key = guarded
    big = b'{"model": "tiny", "prompt": "' + b"a" * 4000 + b'"}'
    headers = {**key, "content-type": "application/json"}
    assert httpx.post(f"{url}/v1/completions", content=big, headers=headers).status_code == 413
    in_pieces = httpx.post(f"{url}/v1/completions", content=iter([big[:2000], big[2000:]]), headers=headers)
    assert in_pieces.status_code == 413
    assert "2048 bytes" in in_pieces.json()["error"]["message"]


def test_a_full_queue_answers_429_and_recovers(guarded):
    url, key = guarded
    with httpx.Client(headers=key, timeout=30) as client:
        answers: list[httpx.Response] = []

        def ask():
            answers.append(client.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 200}))

        threads = [threading.Thread(target=ask) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        codes = sorted(answer.status_code for answer in answers)
        assert set(codes) == {200, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert client.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200
    assert gauge(url, "lockstep:kv_pages_used") == 0


def test_more_than_the_queue_could_ever_hold_is_a_mistake(guarded):
    """429 would have its client try again for ever."""
    url, key = guarded
    for more in ({"n": 3}, {"prompt": ["a", "b", "c"]}):
        answer = httpx.post(f"{url}/v1/completions", json={**LONG, **more}, headers=key)
        assert answer.status_code == 400
        assert "3 completions are asked for, but no more than 2 may wait here" in answer.json()["error"]["message"]


def test_prompts_of_one_request_start_together(replaceable):
    """They reach the engine at once, not one for each of its steps."""
    url, _ = replaceable
    before = gauge(url, "lockstep:engine_steps_total")
    asked = {"model": "tiny", "prompt": [[i + 3] for i in range(24)], "max_tokens": 4, "ignore_eos": True}
    assert len(httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()["choices"]) == 24
    assert gauge(url, "lockstep:engine_steps_total") - before < 12


def optional(count: int) -> dict:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def test_a_structure_that_takes_too_long_is_refused_and_holds_nobody_up(replaceable):
    """Twelve thousand optional properties would take minutes. Who asks meanwhile, for a structure or without one, is
    answered; so is who asks for a long one afterwards."""
    url, _ = replaceable

    def ask(structure: dict) -> httpx.Response:
        asked = {"model": "tiny", "prompt": "a", "max_tokens": 9, "structured_outputs": structure}
        return httpx.post(f"{url}/v1/completions", json=asked, timeout=60)

    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(ask, {"json": optional(12_000 + i)}) for i in range(2)]
        begun = time.monotonic()
        assert ask({"choice": ["meanwhile"]}).json()["choices"][0]["text"] == "meanwhile"
        assert time.monotonic() - begun < 5
        assert not any(answer.done() for answer in slow[1:])
    for answer in slow:
        assert answer.result().status_code == 400
        assert "takes longer than 0.5 seconds to compile" in answer.result().json()["error"]["message"]
    assert ask({"json": {**optional(100), "required": ["p0"]}}).status_code == 200
    wrong = ask({"json": {**optional(100), "uniqueItems": True, "type": "array"}})
    assert (wrong.status_code, "uniqueItems" in wrong.text) == (400, True)


def test_a_deadline_ends_a_request(guarded):
    url, key = guarded
    answer = httpx.post(f"{url}/v1/completions", json={**LONG, "timeout": 0.05}, headers=key)
    assert answer.status_code == 408
    assert answer.json()["error"]["type"] == "timeout_error"
    assert "timeout" in answer.json()["error"]["message"]
    with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "timeout": 0.3, "stream": True}, headers=key) as s:
        events = "".join(s.iter_text()).split("\n\n")
    assert '"error"' in events[-3]
    assert events[-2] == "data: [DONE]"
    assert gauge(url, "lockstep:kv_pages_used") == 0


def leave_a_stream(client: httpx.Client, url: str) -> None:
    with client.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as answer:
        next(answer.iter_text())


def leave_an_answer(client: httpx.Client, url: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        client.post(f"{url}/v1/completions", json={**LONG, "n": 2}, timeout=0.3)


@pytest.mark.parametrize("leave", [leave_a_stream, leave_an_answer])
def test_a_client_that_leaves_frees_its_pages(guarded, leave):
    url, key = guarded
    with httpx.Client(headers=key) as client:
        leave(client, url)
    wait_for(lambda: gauge(url, "lockstep:kv_pages_used") == 0)
    assert gauge(url, "vllm:num_requests_running") == 0


def test_weights_are_replaced_only_where_allowed(guarded, tmp_path):
    url, key = guarded
    refused = httpx.post(f"{url}/v1/weights", json={"path": str(tmp_path)}, headers=key)
    assert refused.status_code == 403
    assert "weight_updates=true" in refused.json()["error"]["message"]


def test_weights_are_replaced_between_steps(replaceable, tmp_path):
    url, _ = replaceable
    other, wider = tiny_model(), tiny_model(intermediate_size=128)
    other.decoder.norm.weight.data *= 1.5
    other.save(tmp_path / "other")
    wider.save(tmp_path / "wider")
    asked = {"model": "tiny", "prompt": [5] * 130, "max_tokens": 8, "seed": 1, "logprobs": 0, "return_token_ids": True}

    def ask():
        choice = httpx.post(f"{url}/v1/completions", json=asked).json()["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    before = ask()
    for path, said in (("nowhere", "no such file"), ("wider", "do not fit")):
        answer = httpx.post(f"{url}/v1/weights", json={"path": str(tmp_path / path)})
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
    assert ask() == before
    assert httpx.post(f"{url}/v1/weights", json={"path": str(tmp_path / "other")}).status_code == 200
    tokens, logprobs = ask()
    assert logprobs == other.logprobs([5] * 130 + tokens)[129:].tolist() != before[1]


def connects(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_sigterm_finishes_what_runs_and_refuses_the_rest():
    with server() as (url, process):
        chunks = []

        def read():
            with httpx.stream(
                "POST", f"{url}/v1/completions", json={**LONG, "max_tokens": 300, "stream": True}, timeout=60
            ) as answer:
                chunks.extend(answer.iter_lines())

        reader = threading.Thread(target=read)
        reader.start()
        wait_for(lambda: chunks)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: not connects(url))
        reader.join(60)
        assert "data: [DONE]" in chunks
        assert process.wait(20) == 0


def test_sigterm_ends_within_its_limit():
    with server(drain_seconds=0) as (url, process):
        begun = threading.Event()

        def read():
            with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as answer:
                for _ in answer.iter_lines():
                    begun.set()

        def read_until_cut():
            with pytest.raises(httpx.TransportError):
                read()

        reader = threading.Thread(target=read_until_cut)
        with meanwhile(url, 1) as said:
            reader.start()
            assert begun.wait(60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        reader.join(20)
        assert not reader.is_alive()
        assert said[0].status_code == 503
        assert "is shutting down" in said[0].json()["error"]["message"]


def test_a_killed_engine_fails_what_it_ran_and_is_started_again(replaceable, tmp_path):
    """kill -9: errors within 5 s, health stays up, /ready tells, and new weights are still the ones served."""
    other = tiny_model()
    other.decoder.norm.weight.data *= 1.5
    other.save(tmp_path / "other")
    asked = {"model": "tiny", "prompt": [5] * 130, "max_tokens": 8, "seed": 1, "logprobs": 0, "return_token_ids": True}
    url, process = replaceable
    httpx.post(f"{url}/v1/weights", json={"path": str(tmp_path / "other")}).raise_for_status()
    before = httpx.post(f"{url}/v1/completions", json=asked).json()["choices"]
    said: list[object] = []
    starts = gauge(url, "lockstep:engine_starts_total")

    def whole():
        said.append(httpx.post(f"{url}/v1/completions", json={**LONG, "n": 4}, timeout=60))

    def stream():
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "n": 4, "stream": True}) as answer:
            said.append("".join(answer.iter_text()))

    threads = [threading.Thread(target=ask) for ask in (whole, stream)]
    for thread in threads:
        thread.start()
    wait_for(lambda: gauge(url, "vllm:num_requests_running") == 8)
    killed, begun = engine_of(process), time.monotonic()
    os.kill(killed, signal.SIGKILL)
    for thread in threads:
        thread.join(10)
    assert time.monotonic() - begun < 5
    answer = next(one for one in said if isinstance(one, httpx.Response))
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "killed by SIGKILL" in answer.json()["error"]["message"]
    events = next(one for one in said if isinstance(one, str)).split("\n\n")
    assert "killed by SIGKILL" in events[-3]
    assert events[-2] == "data: [DONE]"
    ready = httpx.get(f"{url}/ready")
    assert ready.status_code == 503
    assert "started again" in ready.json()["reason"]
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.post(f"{url}/v1/completions", json=LONG).status_code == 503
    wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 60)
    assert engine_of(process) != killed
    assert httpx.post(f"{url}/v1/completions", json=asked).json()["choices"] == before
    assert gauge(url, "lockstep:engine_starts_total") == starts + 1


def test_an_engine_that_hangs_is_ended_and_started_again():
    """It is stopped, so it neither answers nor computes; a stopped one does not outlive its server either."""
    with server(hang_seconds=2) as (url, process):
        stopped = engine_of(process)
        with meanwhile(url, 1) as said:
            os.kill(stopped, signal.SIGSTOP)
        assert said[0].status_code == 503
        assert "did not answer for 2 seconds" in said[0].json()["error"]["message"]
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 60)
        os.kill(engine_of(process), signal.SIGSTOP)
        last = engine_of(process)
        process.kill()
        wait_for(lambda: not alive(last))


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path):
    command = [sys.executable, "-m", "lockstep", "serve", str(tmp_path / "nothing"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "nothing" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_told_before_the_model_is_loaded():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LockstepError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)
        command = [sys.executable, "-m", "lockstep", "serve", "no-such-model", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert "is in use" in done.stderr
        assert "Traceback" not in done.stderr


def test_an_unknown_host_is_told():
    with pytest.raises(LockstepError, match="cannot be found"):
        bind("no.such.host.invalid", 0)
