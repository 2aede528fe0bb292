"""The decoding bench on a tiny model."""

from __future__ import annotations

import pytest

from lockstep.bench import decode
from lockstep.bench.decode import bench_decode
from lockstep.cli import app


def test_a_line_for_each_number_of_clients(monkeypatch):
    monkeypatch.setattr(decode, "read_bandwidth", lambda: 1e10)
    report = bench_decode("tiny", [1, 3], tokens=5, rounds=2, note=lambda line: None)
    one, three = report.data["lines"]
    assert (one["clients"], three["clients"]) == (1, 3)
    # Embedding (also the head) 512 x 64, two layers of q, o 64 x 64, k, v 32 x 64 and three of 128 x 64; 2 bytes each.
    assert report.data["weight_bytes"] == 2 * (512 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64))
    for line in (one, three):
        assert len(line["seconds"]) == 2
        assert 0 < line["overhead"] < 1
        assert line["low"] <= line["tokens_per_s"] <= line["high"]
        shares = [report.data["weight_bytes"] / s / 1e10 for s in line["seconds"]]
        assert line["share"] == pytest.approx(sum(shares) / 2)
    assert [row[0] for row in report.rows] == ["1", "3"]


def test_every_step_counted_gives_every_client_a_token(monkeypatch):
    """The prefill is outside the time: as many steps as tokens, however many clients (five prompts are more tokens than
    a step has by default)."""
    calls = []
    real = decode.Engine.step
    monkeypatch.setattr(decode.Engine, "step", lambda self: calls.append(1) or real(self))
    monkeypatch.setattr(decode, "read_bandwidth", lambda: 1e10)
    bench_decode("tiny", [5], tokens=5, rounds=1, note=lambda line: None)
    assert len(calls) == 3 * (1 + 5), "a warm-up, a round and one with operators timed, each a prefill and five more"


def test_wrong_clients_are_told(capsys):
    assert app.run(["bench", "decode", "--clients", "1,x"]) == 2
    assert "--clients is '1,x'" in capsys.readouterr().err
