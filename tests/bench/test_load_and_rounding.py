"""The benches of loading and of rounding, on tiny models."""

from __future__ import annotations

import pytest

from lockstep.bench.load import WHAT, bench_load
from lockstep.bench.rounding import bench_rounding
from tests.serve.tiny import tiny_model


def test_loading_takes_turns_with_transformers():
    report = bench_load(None, "tiny", 2, lambda line: None)
    assert [row[0] for row in report.rows] == list(WHAT)
    assert set(report.data["seconds"]) == {f"{who}: {what}" for who in ("lockstep", "transformers") for what in WHAT}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in report.data["seconds"].values())
    assert all(row[3].endswith("x") for row in report.rows)


def test_rounding_is_small_and_not_nothing(tmp_path):
    model = tiny_model()
    model.save(tmp_path / "tiny")
    report = bench_rounding(str(tmp_path / "tiny"), 40)
    ours, theirs = report.data
    assert (ours["side"], theirs["side"]) == ("lockstep", "transformers")
    for error in (ours, theirs):
        assert 0 < error["mean"] < error["largest"]
        # bfloat16 has 8 bits, and logits of this model go up to about 10.
        assert error["largest"] < 0.5
    assert ours["mean"] == pytest.approx(theirs["mean"], rel=4), "the same weights and text"
