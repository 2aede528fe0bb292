"""The report of a compilation: what the tables say, and what the page holds."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console
from torch import fx

from lockstep.compile.passes import PassContext, PassReport, apply, pipeline
from lockstep.compile.report import compile_report, save_graphs
from tests.compile.passes.blocks import config, trained


@dataclass
class Stage:
    name: str
    cached: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    passes: tuple[PassReport, ...] = ()
    before: fx.GraphModule | None = None
    after: fx.GraphModule | None = None


@pytest.fixture(scope="module")
def block() -> Stage:
    before, _ = trained(config())
    after, _ = trained(config())
    reports = apply(after, pipeline("O2"), PassContext(1))
    return Stage("block", False, {"capture": 0.25, "passes": 0.05}, reports, before, after)


def printed(*stages: Stage) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(compile_report(stages, {"plan": 0.5}))
    return console.export_text()


def test_the_tables_give_times_and_what_each_pass_did(block: Stage) -> None:
    text = printed(block, Stage("head", True, {"cache": 0.001}))
    assert re.search(r"block\W+250\.0\W+50\.0\W+300\.0", text)
    assert "head (from the cache)" in text
    assert re.search(r"all\W+250\.0\W+50\.0\W+1\.0\W+500\.0\W+801\.0", text)
    assert re.search(r"fuse-products\W+1\W", text)
    products = next(report for report in block.passes if report.name == "fuse-products")
    assert f"{products.before} -> {products.after}" in text


def test_passes_that_changed_nothing_are_counted_and_one_alone_is_named() -> None:
    idle = [PassReport(name, 0, (), 5, 5, 0.001) for name in ("views", "recompute")]
    assert re.search(r"block\W+2 others\W+0\W", printed(Stage("block", passes=(*idle,))))
    assert re.search(r"block\W+recompute\W+0\W", printed(Stage("block", passes=(idle[1],))))


def test_notes_are_told_once_with_their_number() -> None:
    report = PassReport("fuse-products", 0, ("gated: has a bias",), 5, 5, 0.001)
    text = printed(Stage("block", passes=(report,)), Stage("block", passes=(report,)))
    assert text.count("has a bias") == 1
    assert "fuse-products: gated: has a bias (2 times)" in text


def page_data(path: Path) -> list[dict]:  # type: ignore[type-arg]
    found = re.search(r'id="data">(.*?)</script>', path.read_text(), re.S)
    assert found
    return json.loads(found[1].replace("<\\/", "</"))


def test_the_page_holds_both_graphs_with_fused_regions_and_costs(block: Stage, tmp_path: Path) -> None:
    path = tmp_path / "graphs.html"
    assert save_graphs(path, "a <run>", [block, block])
    assert "a &lt;run&gt;" in path.read_text()
    assert not re.search(r"https?://|src=|@import|url\(", path.read_text())
    first, second = page_data(path)
    assert [first["name"], second["name"]] == ["block 0", "block 1"]
    parts = {n["name"] for n in first["before"]["nodes"] if n["fused"] == "gate/up + gated activation"}
    (fused,) = [n for n in first["after"]["nodes"] if n["op"] == "gemm_gated"]
    assert parts == set(fused["of"])
    assert len(parts) == 3
    flops = sum(n["flops"] for n in first["before"]["nodes"] if n["name"] in parts)
    assert fused["flops"] == flops > 0
    assert fused["bytes"] < sum(n["bytes"] for n in first["before"]["nodes"] if n["name"] in parts)
    assert {n["part"] for n in first["after"]["nodes"]} == {"forward", "backward"}


def test_no_page_without_graphs(tmp_path: Path) -> None:
    assert not save_graphs(tmp_path / "graphs.html", "run", [Stage("block", cached=True)])
    assert not (tmp_path / "graphs.html").exists()
