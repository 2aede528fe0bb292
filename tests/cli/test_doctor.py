"""The report on this machine: what it names, and that every missing thing has its cost."""

from __future__ import annotations

import json

import pytest

from lockstep.cli import app
from lockstep.cli import doctor as command
from lockstep.ops import build, peaks


@pytest.fixture
def report(capsys, monkeypatch):
    """The report as {name: finding}, with quick measurements."""
    monkeypatch.setattr(peaks, "_LARGEST", 128)
    for measured in (peaks.matrix_peak, peaks.torch_rate, peaks.contract_rate):
        measured.cache_clear()

    def go():
        assert app.run(["doctor", "--json"]) == 0
        return {line["name"]: line for line in json.loads(capsys.readouterr().out)}

    yield go
    for measured in (peaks.matrix_peak, peaks.torch_rate, peaks.contract_rate):
        measured.cache_clear()
    build.find_compiler.cache_clear()


def test_the_report_names_what_a_run_depends_on(report):
    found = report()
    assert found["device class"]["value"].startswith("cpu-")
    assert {"C++ compiler", "processor", "memory", "accelerator", "python", "torch"} <= set(found)
    for name in ("float32 matrix peak", "bfloat16 matrix peak"):
        assert float(found[name]["value"].split()[0]) > 0
    assert found["memory read"]["value"].endswith("GB/s")
    assert found["torch"]["cost"] is None


def test_without_a_compiler_the_cost_is_the_bit_contract(report, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.find_compiler.cache_clear()
    found = report()
    assert found["C++ compiler"]["value"] == "none"
    assert "only numerics: fast" in found["C++ compiler"]["cost"]


def test_a_kernel_that_is_not_built_says_when_it_will_be(report, monkeypatch):
    monkeypatch.setattr(build, "is_built", lambda isa: False)
    found = report()
    (extension,) = [line for name, line in found.items() if name.endswith(" extension")]
    assert extension["value"] == "not built"
    assert "builds it" in extension["cost"]
    assert "float32 product, contract" not in found


def test_every_missing_package_has_its_cost(report, monkeypatch):
    monkeypatch.setattr(command, "_version", lambda package: None)
    found = report()
    for name in (*command._NEEDED, *command._OPTIONAL):
        assert found[name]["cost"]


def test_the_table_has_every_line(report, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    names = report()
    assert app.run(["doctor"]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in names)
