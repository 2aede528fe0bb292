"""Reports, sections of a document, and sides that take turns."""

from __future__ import annotations

import json

import pytest

from lockstep.bench import Machine, Report, Spread, take_turns, write_section
from lockstep.bench.turns import ratios
from lockstep.errors import LockstepError

MACHINE = Machine("CPU X", "cpu-fma", 2, 2, 0.1, "2026-01-02", {"torch": "9.9"})


def report(**changes):
    given = {
        "name": "ops", "title": "Operators", "command": "lockstep bench ops", "machine": MACHINE,
        "columns": ("operator", "ms"), "rows": (("a|b", "1.5"),), "notes": ("why",), "data": {"x": 1},
    }  # fmt: skip
    return Report(**(given | changes))


def test_markdown_names_command_and_machine_and_keeps_bars_out_of_cells():
    text = report().markdown()
    assert text.startswith(
        "## Operators\n\n`lockstep bench ops` on CPU X, 2 cores, 2 threads, `cpu-fma`; torch 9.9; 2026"
    )
    assert "| operator | ms |\n|---|---:|\n| a\\|b | 1.5 |\n\n- why\n" in text
    assert "other programs" not in text


def test_a_busy_machine_is_told_of():
    busy = Machine("CPU X", "cpu-fma", 2, 2, 1.7, "2026-01-02", {})
    assert "load 1.7: other programs ran too" in report(machine=busy).markdown()


def test_json_holds_the_numbers_and_what_made_them():
    found = json.loads(report().json())
    assert found["result"] == {"x": 1}
    assert found["machine"]["versions"] == {"torch": "9.9"}
    assert (found["bench"], found["command"], found["notes"]) == ("ops", "lockstep bench ops", ["why"])


def test_a_row_of_another_width_is_refused():
    with pytest.raises(AssertionError, match="1 cells under 2"):
        report(rows=(("x",),))


def test_sections_are_begun_replaced_in_place_and_leave_the_rest_alone(tmp_path):
    document = tmp_path / "docs" / "performance.md"
    write_section(document, "ops", "first")
    write_section(document, "train", "second")
    begun = document.read_text()
    assert begun.startswith("# Performance\n")
    assert begun.index("first") < begun.index("second")
    document.write_text(begun.replace("<!-- section: train -->", "by hand\n\n<!-- section: train -->"))
    write_section(document, "ops", "anew\n")
    changed = document.read_text()
    assert changed == begun.replace("first", "anew").replace(
        "<!-- section: train -->", "by hand\n\n<!-- section: train -->"
    )
    write_section(document, "ops", "anew")
    assert document.read_text() == changed, "writing the same again changes nothing"
    assert [path.name for path in document.parent.iterdir()] == ["performance.md"], "no temporary file stays"


@pytest.mark.parametrize(
    "text",
    [
        "<!-- section: ops -->\n",
        "<!-- end: ops -->\n<!-- section: ops -->\n",
        "<!-- section: ops -->\n<!-- end: ops -->\n" * 2,
    ],
)
def test_broken_marks_are_an_error_and_the_document_stays(tmp_path, text):
    document = tmp_path / "p.md"
    document.write_text(text)
    with pytest.raises(LockstepError, match="section 'ops'"):
        write_section(document, "ops", "x")
    assert document.read_text() == text


def test_sides_take_turns_and_the_warm_up_is_not_counted():
    calls, rounds = [], []
    sides = {name: lambda name=name: (calls.append(name), len(calls))[1] for name in ("a", "b")}
    found = take_turns(sides, rounds=2, warmup=1, progress=lambda i, answers: rounds.append((i, answers)))
    assert calls == ["a", "b"] * 3
    assert found == {"a": [3, 5], "b": [4, 6]}
    assert rounds == [(0, {"a": 3, "b": 4}), (1, {"a": 5, "b": 6})]


def test_spread_and_ratios():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([3.0, 1.0, 2.0]).width == 1.0
    # The ratio of each round, not of the medians: the middle round was a busy one.
    assert ratios([1.0, 10.0, 1.0], [2.0, 30.0, 2.0]) == Spread(2.0, 2.0, 3.0)
