"""The serving bench on real server processes with a tiny model."""

from __future__ import annotations

import os
import socket
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch

from lockstep.bench import describe
from lockstep.bench.limit import Limit
from lockstep.bench.serving import SIDES, Load, Server, Side, ask, compare
from lockstep.bench.serving.compare import Sizes
from lockstep.bench.serving.copies import _kept
from lockstep.bench.serving.gguf_copy import copy_as_f16
from lockstep.errors import LockstepError
from lockstep.serve.port import bind, url
from tests.serve.conftest import saved

TINY = Side(
    "lockstep",
    (sys.executable, "-m", "lockstep", "serve", saved(), "--model-name", "tiny", "--port", "{port}"),
    body={"ignore_eos": True, "model": "tiny"},
)
OTHER = Side("other", TINY.command, body=TINY.body)


def test_two_servers_take_turns_under_the_same_loads() -> None:
    servers = [Server(side, {}) for side in (TINY, OTHER)]
    said: list[str] = []
    limit = Limit(layers=2e6, head=1e6, pair=1e3, weights=4e6, peak=1e11, bandwidth=1e10)
    report = compare(servers, 300, Sizes((1, 3), 6, 8, 20, 2), describe(), limit, "the command", said.append)
    assert report.columns == ("", "lockstep", "other")
    names = [row[0] for row in report.rows]
    assert names[0] == "1 client: output tokens/s"
    assert names[4] == "3 clients: output tokens/s"
    assert "prefill of 20, tokens/s" in names
    rate = report.data["loads"]["3 clients"]["other"][0]
    assert rate["rate"] > 0
    assert 0 < rate["first"] < 60
    assert report.data["peak_bytes"]["other"] > 50 * 2**20
    assert "round 2 of 2: long prompt, other" in said
    most = f"{limit.rate(1, 6, 8):.0f} / {limit.rate(3, 6, 8):.0f} output tokens/s to 1 / 3 clients"
    assert most in report.notes[1]
    assert report.notes[2].startswith("Of that limit: 1 client lockstep ")


def test_a_port_is_its_servers_until_the_end() -> None:
    waiting = Server(TINY, {})
    address = ("127.0.0.1", int(waiting.url.rsplit(":", 1)[1]))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(address)
    with bind(*address) as bound:
        assert url(bound) == waiting.url
    waiting.end()
    with socket.socket() as other:
        other.bind(address)


def test_what_does_not_run_is_told_with_its_log() -> None:
    broken = Server(Side("broken", (sys.executable, "-c", "raise SystemExit('no such thing')")), {})
    with pytest.raises(LockstepError, match=r"(?s)broken did not start.*no such thing"):
        broken.start()
    with pytest.raises(
        LockstepError, match=r"vllm is not installed: /none/vllm/bin/python is missing. Run benchmarks/peers.sh"
    ):
        Server(SIDES["vllm"], {"peers": "/none", "last": "1", "directory": "d", "context": "1", "clients": "1"})


@pytest.mark.parametrize(
    ("status", "events", "message"),
    [
        (404, "", "refused a completion with 404"),
        (200, 'data: {"error": {"message": "out of pages"}}\n\n', "broke a stream: .*out of pages"),
        (200, 'data: {"choices": [{}], "usage": {"completion_tokens": 3}}\n\n', "for 4 tokens with 3"),
    ],
)
def test_a_wrong_answer_is_an_error_not_a_number(status: int, events: str, message: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(events.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as answering:
        Thread(target=answering.handle_request, daemon=True).start()
        with pytest.raises(LockstepError, match=message):
            ask(f"http://127.0.0.1:{answering.server_port}", {"model": "none"}, [[1, 2]], 4)


def test_the_numbers_of_a_load() -> None:
    load = Load(first=(0.1, 0.3, 0.2), gaps=tuple(i / 100 for i in range(1, 101)), tokens=30, seconds=2.0)
    assert (load.rate, load.median_first, load.gap(0.5), load.gap(0.99)) == (15.0, 0.2, 0.51, 1.0)


def test_the_models_copies_are_made_once_and_again_when_the_model_changes(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(target: Path) -> None:
        made.append(target)
        target.write_text("whole")

    source = tmp_path / "model.gguf"
    source.write_text("")
    places = [_kept(source, "f16.gguf", tmp_path / "kept", make) for _ in range(2)]
    assert places[0] == places[1]
    assert places[0].read_text() == "whole"
    assert len(made) == 1
    os.utime(source, (1, 1))
    assert _kept(source, "f16.gguf", tmp_path / "kept", make) != places[0]
    assert len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.slow
def test_a_copied_gguf_has_the_same_weights_in_float16(tmp_path: Path) -> None:
    """pytest -m slow tests/bench/test_serving.py"""
    import lockstep
    from lockstep.model.source import resolve

    copy_as_f16(Path(resolve("smollm2-135m")), tmp_path / "a.gguf")
    ours, theirs = (
        lockstep.load(source, dtype="float32").decoder for source in ("smollm2-135m", str(tmp_path / "a.gguf"))
    )
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(a if a.dim() == 1 else a.half().float(), b), name
