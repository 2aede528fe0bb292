"""What plain YAML values mean here, against the traps of YAML 1.1."""

from __future__ import annotations

import pytest

from lockstep.config.strict_yaml import parse, parse_scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1e5", 1e5), ("-2.5E+3", -2500.0), (".5", 0.5), ("5.", 5.0), ("1_000", 1000), ("010", 10),
        ("-7", -7), ("true", True), ("False", False), ("yes", "yes"), ("no", "no"), ("on", "on"), ("null", None),
        ("~", None), ("", None), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("0x1F", "0x1F"), ("-", "-"),
        ("1e", "1e"), ("e5", "e5"), (".", "."), ("1_", "1_"), ("nan", "nan"), ("-.inf", float("-inf")),
    ],
)  # fmt: skip
def test_plain_values(text, value):
    assert parse_scalar(text) == value
    assert type(parse_scalar(text)) is type(value)
    if text not in ("", "-"):  # in a list these are syntax
        assert parse(f"[{text}]", "text") == [value]


def test_anchors_and_merges_work():
    assert parse("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}\n", "text") == {"a": {"p": 1, "q": 2}, "b": {"p": 1, "q": 3}}
