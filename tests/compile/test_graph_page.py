"""The page of the graphs in a headless Chromium, as a person uses it, from a file and without a network."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from lockstep.compile.graph_view import save_graph_view, stage_data
from lockstep.compile.passes import PassContext, apply, pipeline
from tests import chromium
from tests.chromium import browser as browser
from tests.compile.passes.blocks import config, trained

pytestmark = chromium.needed


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block with its passes, and the same with many nodes more."""
    before, _ = trained(config())
    after, _ = trained(config())
    reports = apply(after, pipeline("O2"), PassContext(1))
    notes = [f"{report.name}: {note}" for report in reports for note in report.notes]
    block = stage_data("block", before, after, 1, notes)
    path = tmp_path_factory.mktemp("page") / "graphs.html"
    save_graph_view(path, "A run", [block, _deep(block, 40)])
    return path


def _deep(block: dict, times: int) -> dict:  # type: ignore[type-arg]
    """As many blocks below each other: graphs of thousands of nodes."""
    made = {**block, "name": "deep"}
    for side in ("before", "after"):
        nodes, edges = block[side]["nodes"], block[side]["edges"]
        depth, count = 1 + max(node["y"] for node in nodes), len(nodes)
        made[side] = {
            "nodes": [{**n, "name": f"{n['name']}_{i}", "y": n["y"] + i * depth} for i in range(times) for n in nodes],
            "edges": [
                [a + i * count, b + i * count, [[x, y + i * depth] for x, y in path]]
                for i in range(times) for a, b, path in edges
            ],
        }  # fmt: skip
    return made


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Page]:
    """The page, of which every error in the console and every request to elsewhere is a failure."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(10_000)
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    opened.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith("file:") else None)
    opened.goto(file.as_uri())
    yield opened
    context.close()
    assert not wrong


def colour(page: Page, selector: str) -> str:
    return str(page.eval_on_selector(selector, "box => getComputedStyle(box).fill"))


def test_both_graphs_are_there_and_every_operator_tells_its_cost(page: Page) -> None:
    expect(page.locator("#head0")).to_contain_text(re.compile(r"Captured\d+ operators · [\d.]+ [kMG]?FLOP · "))
    expect(page.locator("#head1")).to_contain_text("After the passes")
    (many, few) = (int(page.locator(f"#head{i} small").inner_text().split()[0]) for i in (0, 1))
    assert many > few > 10
    product = page.locator("#view1 .node", has_text="gemm_gated").first
    expect(product.locator(".small")).to_have_text(re.compile(r"^[\d.]+ [kM]FLOP · [\d.]+ [kM]?B$"))
    product.hover()
    expect(page.locator("#tip")).to_contain_text(re.compile(r"FLOP, [\d.]+ [kM]?B read and written"))
    expect(page.locator("#tip")).to_contain_text("fused: gate/up + gated activation (")


def smallest(page: Page, side: int) -> float:
    """Pixels of the height of the least name."""
    names = f"[...document.querySelectorAll('#view{side} .node text:not(.small)')]"
    return float(page.evaluate(f"Math.min(...{names}.map(one => one.getBoundingClientRect().height))"))


@pytest.mark.parametrize("width", [1280, 390])
def test_all_of_a_block_is_seen_at_first_and_a_double_click_makes_it_readable(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.reload()
    outside = """side => { const frame = document.getElementById("view" + side).getBoundingClientRect();
        return [...document.querySelectorAll(`#view${side} .node rect`)].filter(box => {
            const b = box.getBoundingClientRect();
            return b.left < frame.left || b.right > frame.right || b.top < frame.top || b.bottom > frame.bottom;
        }).length; }"""
    for side in (0, 1):
        assert page.evaluate(outside, side) == 0
        assert smallest(page, side) < 8
        page.locator(f"#view{side} .node", has_text="attention").first.dblclick()
        assert smallest(page, side) >= 8
        assert page.evaluate(outside, side) > 0
        page.locator(f"#view{side} .node", has_text="attention").first.dblclick()
        assert page.evaluate(outside, side) == 0


def test_a_fused_region_has_one_colour_on_both_sides_and_in_the_key(page: Page) -> None:
    parts = page.evaluate(
        """() => { const g = stages[0]; const on = (s, want) => g[s].nodes.flatMap((n, i) => want(n) ? [i] : []);
        return [on("before", n => n.fused.startsWith("gate/up")), on("after", n => n.fused.startsWith("gate/up"))]; }"""
    )
    before = {colour(page, f"#view0 [data-node='{i}'] rect") for i in parts[0]}
    after = {colour(page, f"#view1 [data-node='{i}'] rect") for i in parts[1]}
    key = page.locator("#key span", has_text="fused: gate/up + gated activation").locator("i")
    assert before == after == {key.evaluate("swatch => getComputedStyle(swatch).backgroundColor")}
    names = page.locator("#key span").all_inner_texts()
    fusions = [name for name in names if name.startswith("fused: ")]
    shades = {page.locator("#key span", has_text=name).first.locator("i").get_attribute("style") for name in fusions}
    assert len(shades) == len(fusions) >= 3


def test_a_click_shows_the_region_on_the_other_side_and_another_takes_it_away(page: Page) -> None:
    page.locator("#view1 .node", has_text="gemm_gated").first.click()
    picked = page.locator("#view0 .node.picked")
    expect(picked).to_have_count(3)
    assert page.locator("#view1 .node.far").count() > 10
    page.locator("#view1").click(position={"x": 4, "y": 4})
    expect(picked).to_have_count(0)


def test_keys_and_the_wheel_move_and_zoom(page: Page) -> None:
    view, drawing = page.locator("#view0"), page.locator("#view0 > g")
    seen = [drawing.get_attribute("transform")]
    view.focus()
    for key in ("+", "-", "ArrowDown", "0"):
        page.keyboard.press(key)
        seen.append(drawing.get_attribute("transform"))
    view.hover()
    page.mouse.wheel(0, 300)
    moved = "seen => document.querySelector('#view0 > g').getAttribute('transform') !== seen"
    page.wait_for_function(moved, arg=seen[-1])
    assert all(one != two for one, two in itertools.pairwise(seen))


def test_graphs_of_thousands_of_nodes_can_be_used(page: Page) -> None:
    page.get_by_role("tab", name="deep").click()
    assert page.locator("#view0 .node").count() > 2000
    assert smallest(page, 0) >= 8  # the top: of all of it at once boxes would be dots
    page.locator("#view0").focus()
    page.keyboard.press("0")
    box = page.locator("#view0 > g").bounding_box()
    frame = page.locator("#view0").bounding_box()
    assert box is not None
    assert frame is not None
    assert box["height"] <= frame["height"] + 2


def test_a_narrow_window_has_room_for_both_graphs(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    tall = page.evaluate("""['header', '#view0', '#view1'].map(one => document.querySelector(one).clientHeight)""")
    assert tall[0] < 844 / 5
    assert min(tall[1:]) > 844 / 2
    wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] == wide[1]  # tabs and the key of colours scroll within themselves
