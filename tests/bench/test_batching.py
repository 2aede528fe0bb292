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


def test_every_way_is_measured_and_computes_the_rows_that_it_must() -> None:
    """Static batching computes every prompt whole, and for every request as many tokens as the longest of its batch."""
    mix = Mix(6, (70, 200), (2, 20), 128, 3)
    work = mix.draw("the command", tiny_model().config.vocab_size)
    report = batching(tiny_model(), mix, 2, describe(), "the command")
    ways = [name for name, *_ in report.rows]
    assert ways[:2] == ["continuous", "static"]
    rows = {name: report.data[name][0]["rows"] for name in ways}
    prompts = sum(len(prompt) for prompt, _ in work)
    longest = [max(tokens for _, tokens in batch) for batch in (work[:3], work[3:])]
    # A token that was drawn last is not computed.
    assert rows["static"] == prompts + 3 * sum(count - 1 for count in longest)
    assert rows["continuous"] == prompts - 2 * 128 + sum(tokens - 1 for _, tokens in work), "two found the prefix"
    assert rows["static, but done rows leave and prefixes are shared"] == rows["continuous"]
    for name in ways:
        assert len(report.data[name]) == 2
        for run in report.data[name]:
            assert run["rate"] > 0
            assert run["answer"] > 0
            assert 0 < run["share"] < 1
            assert 0 < run["reading"] < 1 - run["share"]
        assert report.data["ratio"][name] > 0
    assert report.data["ratio"]["continuous"] == 1
    assert min(report.data["first"].values()) > 0
