"""The bench of what the contract costs, on a tiny model."""

from __future__ import annotations

from lockstep.bench.contract import _row, bench_contract
from lockstep.cli import app


def test_both_modes_take_turns_in_training_and_in_decoding():
    report = bench_contract("tiny", "float32", (1, 16), [1, 2], 2, 2, lambda line: None)
    assert [row[0] for row in report.rows] == [
        "training step, 1 x 16 tokens", "a token of 1 client", "a token of 2 clients",
    ]  # fmt: skip
    for line in report.data.values():
        assert len(line["bitwise"]) == len(line["fast"]) == 2
        assert min(line["bitwise"] + line["fast"]) > 0
    assert report.name == "contract-float32"


def test_what_bitwise_takes_is_told_round_by_round():
    assert _row("it", [1.0, 2.0, 1.0], [2.0, 2.0, 1.25]) == ("it", "1,000.0", "2,000.0", "-20% (-50% to +0%)")


def test_wrong_sizes_are_told(capsys):
    assert app.run(["bench", "contract", "--batch", "64"]) == 2
    assert "--batch is '64': give sequences x tokens" in capsys.readouterr().err
