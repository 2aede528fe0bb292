"""The batching bench on a tiny model."""

from __future__ import annotations

from lockstep.bench import describe
from lockstep.bench.batching import Mix, batching
from tests.serve.tiny import tiny_model


def test_a_mix_is_drawn_by_its_seed_and_half_shares_a_prefix() -> None:
    mix = Mix(40, (8, 100), (4, 30), 50)
    work = mix.draw("a", 300)
    assert work == mix.draw("a", 300) != mix.draw("b", 300)
    assert len({tuple(prompt[:50]) for prompt, _ in work[1::2]}) == 1
    assert all(8 <= len(prompt) <= 100 for prompt, _ in work)
    assert min(tokens for _, tokens in work) < 10 < 20 < max(tokens for _, tokens in work)


def test_both_ways_are_measured() -> None:
    report = batching(tiny_model(), Mix(6, (8, 40), (2, 20), 10, 3), 2, describe(), "the command")
    assert [row[0] for row in report.rows] == ["continuous", "static"]
    assert len(report.data["static"]) == 2
    for run in (*report.data["continuous"], *report.data["static"]):
        assert run["rate"] > 0
        assert 0 < run["share"] < 1
    assert report.data["ratio"] > 0
