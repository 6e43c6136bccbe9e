"""The flame graph in a real Chromium: trees, zoom, search, keys, links, the table behind it, differences.

As a page of its own and as a picture, too: what is shown and found there, and what never runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.analyze.context import Context
from stepscope.analyze.pictures.sampled_flame import flame_diff, flame_graph
from stepscope.dashboard import bundle, single
from stepscope.model.sampled import FlameGraph
from stepscope.report import flame
from tests.analyze.flame.scenes import context, stack, steps, tree
from tests.browser_page import Opened
from tests.dashboard.browser import Look, View
from tests.dashboard.client import Dashboard

Served = Callable[[str], str]
PICTURE = ".picture[role=application]"


@pytest.fixture
def small(dashboard: Dashboard, served: Served, look: Look) -> View:
    return drawn(look(dashboard.page(served("small"), "flame")))


def drawn(view: View) -> View:
    view.ready()
    view.until(lambda: view.page.locator("g.frame").count() > 0)
    return view


def current(view: View) -> str:
    """The name of the chosen box."""
    return str(view.page.locator(".current strong").inner_text())


def box(view: View, name: str) -> None:
    """Click a box by a part of what stands on it."""
    view.page.locator("g.frame", has=view.page.get_by_text(name)).last.locator("rect").click()


def test_a_click_zooms_and_a_link_restores_it(small: View) -> None:
    boxes = small.page.locator("g.frame").count()
    box(small, "decode")
    small.until(lambda: current(small).startswith("decode"))
    assert "data.py:21" in small.text(".current")
    small.until(lambda: small.parameter("zoom") is not None)
    address = small.page.url
    zoomed = small.settled(lambda: small.page.locator("g.frame").count())

    small.page.goto("about:blank")
    drawn(small.go(address))
    small.until(lambda: current(small).startswith("decode"))
    small.until(lambda: small.page.locator("g.frame").count() == zoomed)

    small.page.get_by_role("button", name="Reset").click()
    small.until(lambda: small.page.locator("g.frame").count() == boxes)
    small.until(lambda: small.parameter("zoom") is None)


def test_keys_walk_zoom_and_turn(small: View) -> None:
    picture = small.page.locator(PICTURE)
    whole = current(small)
    for _ in range(3):
        picture.press("ArrowDown")
    small.until(lambda: current(small) != whole)
    walked = current(small)
    picture.press("Enter")
    small.until(lambda: small.parameter("zoom") is not None)
    assert current(small) == walked
    picture.press("Escape")
    small.until(lambda: small.parameter("zoom") is None)

    top = small.page.locator("g.frame").first
    before = top.get_attribute("transform")
    picture.press("i")
    small.until(lambda: top.get_attribute("transform") != before)
    assert small.page.get_by_role("button", name="Flame", exact=True).get_attribute("aria-pressed") == "true"


def test_accessible(dashboard: Dashboard, served: Served, look: Look) -> None:
    view = drawn(look(dashboard.page(served("small"), "flame", **{"with": served("fuzzed")}), axe=True))
    view.page.get_by_text("The tree as a table").click()
    assert view.violations() == []
    view.page.emulate_media(color_scheme="dark")
    assert view.violations() == []


EVIL = "</script><script>alert(1)</script>"
Open = Callable[..., Opened]


def run() -> Context:
    return context(
        [
            stack("main:9", "train:20", "forward (torch/nn/modules/linear.py:134)", samples=50, phase="forward"),
            stack("main:9", "train:21", samples=10, phase="backward"),
            stack("main:9", "fetch:42", "select (selectors.py:415)", samples=40, phase="data_wait", waiting=True),
            stack("load:60", EVIL, samples=100, role="loader_worker", pid=9, phase=None),
        ],
        steps=steps(),
    )


def opened(graph: FlameGraph, tmp_path: Path, open_page: Open) -> Opened:
    """The page of the graph, drawn."""
    if bundle.load() is None:
        pytest.skip(bundle.missing())
    file = tmp_path / "run.html"
    file.write_text(single.flame_page(graph), encoding="utf-8")
    found = open_page(file)
    found.until(lambda: found.page.locator("g.frame").count() > 0)
    return found


@pytest.fixture
def shown(tmp_path: Path, open_page: Open) -> Opened:
    return opened(flame_graph(run()), tmp_path, open_page)


def labels_of(opened: Opened) -> set[str]:
    """The labels of all boxes with room for one."""
    read = "all => all.filter(e => e.style.display !== 'none').map(e => e.textContent)"
    found = opened.settled(lambda: set(opened.page.locator(".d3-flame-graph-label").evaluate_all(read)))
    return found - {""}


def box_of(opened: Opened, name: str) -> Any:
    return opened.page.locator(f".picture g.frame[name^='{name}']").first


def width(opened: Opened, name: str) -> float:
    return opened.settled(lambda: float(box_of(opened, name).locator("rect").get_attribute("width")))


def test_boxes_tips_and_searches(shown: Opened) -> None:
    found = labels_of(shown)
    assert {"everything", "main threads", "loader workers", "forward", "select", "train  train.py:20"} <= found
    assert shown.text("section.flame h2") == "demo"
    assert "ms per step" in shown.text("section.flame > p.muted")
    assert {"your code", "library", "waiting"} <= set(shown.text(".legend").split("\n"))
    assert width(shown, "forward") == pytest.approx(width(shown, "everything") / 4, rel=0.01)
    box_of(shown, "fetch").locator("rect").hover()
    tip = shown.text(".tip")
    assert all(part in tip for part in ("train.py:42", "4 ms per step", "20.0 % of the tree"))
    for text, matches, share in (
        ("train.py:42", "1 box", "20.0 %"),
        ("^(forward|select)$", "2 boxes", "45.0 %"),
        ("train.py:4", "Nothing", ""),
        ("SELECT", "1 box", "20.0 %"),
        ("(", "", ""),
    ):
        shown.page.fill("input[type=search]", text)
        said = (matches, share, shown.page.locator("input[type=search]"))
        shown.until(lambda said=said: said[0] in shown.text(".tools .found") and said[1] in shown.text(".tools .found"))
        expected = "true" if text == "(" else None
        shown.until(lambda said=said, expected=expected: said[2].get_attribute("aria-invalid") == expected)


def test_a_name_that_is_markup_is_text(shown: Opened) -> None:
    assert any(EVIL in label for label in labels_of(shown))
    box_of(shown, "<").click()
    assert EVIL in shown.text(".current")
    assert shown.page.evaluate("document.scripts.length") == 1  # the front end; the data is taken out once it is read


def test_a_difference_shows_both_sides(tmp_path: Path, open_page: Open) -> None:
    before = context([stack("main", "old", samples=6), stack("main", "same", samples=4)], run={"name": "before"})
    after = context([stack("main", "new", samples=6), stack("main", "same", samples=4)], run={"name": "after"})
    shown = opened(flame_diff(after, before), tmp_path, open_page)
    assert labels_of(shown) == {"everything", "main  train.py:1", "new: new  train.py:1", "same  train.py:1"}
    box_of(shown, "new").locator("rect").hover()
    assert "6 samples in after, 0 samples in before" in shown.text(".tip")
    assert "new: +6" in shown.text(".tip")
    shown.page.get_by_label("Widths of").select_option(label="before")
    assert labels_of(shown) == {"everything", "main  train.py:1", "gone: old  train.py:1", "same  train.py:1"}
    assert {"grown", "shrunk", "new", "gone"} <= set(shown.text(".legend").split("\n"))


def test_a_deep_and_a_wide_tree_can_be_walked(tmp_path: Path, open_page: Open) -> None:
    deep = stack("main", *["ping:1", "pong:2"] * 2048, samples=500)
    wide = [stack("main", f"leaf_{number}:3") for number in range(3000)]
    shown = opened(flame_graph(context([deep, *wide])), tmp_path, open_page)
    assert "ping  train.py:1" in labels_of(shown)
    shown.page.fill("input[type=search]", "pong")
    shown.until(lambda: "14.3 % of the tree" in shown.text(".tools .found"))
    shown.page.keyboard.press("Escape")


@pytest.mark.parametrize("form", ["picture", "page without a front end"])
def test_the_picture_zooms_searches_and_is_harmless(
    tmp_path: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    graph = flame_graph(run())
    file = tmp_path / ("run.svg" if form == "picture" else "run.html")
    monkeypatch.setattr(bundle, "load", lambda: None)
    text = flame.picture(graph, tree(graph)) if form == "picture" else single.flame_page(graph)
    file.write_text(text, encoding="utf-8")
    opened = open_page(file)
    fetch = opened.page.locator("g.box[data-n='fetch'] rect")
    before = float(fetch.get_attribute("width"))
    opened.page.locator("g.box[data-n='fetch']").click()
    assert float(fetch.get_attribute("width")) == pytest.approx(1200, abs=1)
    opened.page.locator("#reset").click()
    assert float(fetch.get_attribute("width")) == pytest.approx(before, abs=0.6)
    plain = fetch.get_attribute("fill")
    opened.page.evaluate("window.prompt = () => 'train.py:42'")
    opened.page.locator("#search").click()
    assert opened.page.locator("#status").text_content() == "1 matched, 20.0 % of the tree"
    assert fetch.get_attribute("fill") != plain
    titles = opened.page.evaluate("[...document.querySelectorAll('g.box title')].map(e => e.textContent)")
    assert any(EVIL in title for title in titles)
    assert opened.page.evaluate("document.scripts ? document.querySelectorAll('script').length : 1") == 1
