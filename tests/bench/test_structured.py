"""The bench of structured output on a tiny model."""

from __future__ import annotations

from lockstep.bench import describe
from lockstep.bench.structured import structured
from tests.serve.tiny import tiny_model


def test_both_ways_are_measured_for_each_number_of_sequences() -> None:
    report = structured(tiny_model(), (1, 3), 6, 2, describe(), "the command")
    assert [row[0] for row in report.rows] == ["1", "3"]
    for count in ("1", "3"):
        found = report.data[count]
        assert len(found["plain"]) == len(found["schema"]) == 2
        assert min(found["plain"] + found["schema"]) > 0
        assert found["ratio"] > 0
