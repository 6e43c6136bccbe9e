"""The page and the picture of a flame graph in a real browser: what is shown, found, zoomed, and what never runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.analyze.context import Context
from stepscope.analyze.pictures.flame_diff import flame_diff
from stepscope.analyze.pictures.sampled_flame import flame_graph
from stepscope.report.flame import page as flame_page
from stepscope.report.flame import svg
from tests.analyze.flame.trees import context, stack, steps, tree
from tests.browser_page import Opened

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


@pytest.fixture
def shown(tmp_path: Path, open_page: Open) -> Opened:
    file = tmp_path / "run.html"
    file.write_text(flame_page.render(flame_graph(run())), encoding="utf-8")
    return open_page(file)


def labels(opened: Opened) -> set[str]:
    """The labels of all boxes with room for one."""
    read = "all => all.filter(e => e.style.display !== 'none').map(e => e.textContent)"
    found = opened.settled(lambda: set(opened.page.locator(".d3-flame-graph-label").evaluate_all(read)))
    return found - {""}


def box(opened: Opened, name: str) -> Any:
    return opened.page.locator(f"#chart g.frame[name^='{name}']").first


def width(opened: Opened, name: str) -> float:
    return opened.settled(lambda: float(box(opened, name).locator("rect").get_attribute("width")))


def search(opened: Opened, text: str) -> str:
    """What the page says it found."""
    opened.page.fill("#search", text)
    opened.until(lambda: opened.text("#found") != "")
    return opened.text("#found")


def test_boxes_of_all_processes_are_drawn(shown: Opened) -> None:
    found = labels(shown)
    assert {"everything", "main threads", "loader workers", "forward", "select"} <= found
    assert "train  train.py:20" in found
    assert shown.text("h1") == "demo"
    assert "ms per step" in shown.text("#source")
    assert {"your code", "library", "waiting"} <= set(shown.text("#legend").split("\n"))
    assert width(shown, "forward") == pytest.approx(width(shown, "everything") / 4, rel=0.01)


def test_a_name_that_is_markup_is_text(shown: Opened) -> None:
    assert any(EVIL in label for label in labels(shown))
    box(shown, "<").click()
    assert EVIL in shown.text("#current")
    assert shown.page.evaluate("document.scripts.length") == 4  # three of ours and the data


def test_hovering_tells_what_a_box_is_worth(shown: Opened) -> None:
    labels(shown)
    box(shown, "fetch").locator("rect").hover()
    tip = shown.text("#tip")
    assert "train.py:42" in tip
    assert "4 ms per step" in tip
    assert "20.0 % of the tree" in tip


def test_a_click_zooms_and_reset_goes_back(shown: Opened) -> None:
    labels(shown)
    before = width(shown, "fetch")
    whole = width(shown, "everything")
    box(shown, "fetch").click()
    assert width(shown, "fetch") == pytest.approx(whole)
    assert box(shown, "load").count() == 0
    shown.page.click("#reset")
    assert width(shown, "fetch") == pytest.approx(before)


@pytest.mark.parametrize(
    ("text", "matches", "share"),
    [("train.py:42", "1 box", "20.0 %"), ("^(forward|select)$", "2 boxes", "45.0 %"), ("train.py:4", "nothing", ""),
     ("SELECT", "1 box", "20.0 %"), ("(", "", "")],
)  # fmt: skip
def test_searching(shown: Opened, text: str, matches: str, share: str) -> None:
    labels(shown)
    found = search(shown, text)
    assert matches in found
    assert share in found
    invalid = shown.page.locator("#search").get_attribute("aria-invalid")
    assert invalid == ("true" if text == "(" else None)


def test_what_was_found_is_marked_until_it_is_cleared(shown: Opened) -> None:
    labels(shown)
    plain = box(shown, "fetch").locator("rect").get_attribute("fill")
    search(shown, "fetch")
    assert box(shown, "fetch").locator("rect").get_attribute("fill") != plain
    shown.page.keyboard.press("Escape")
    assert box(shown, "fetch").locator("rect").get_attribute("fill") == plain


def test_another_tree_is_chosen(shown: Opened) -> None:
    labels(shown)
    shown.page.select_option("#tree", label="phase: backward")
    assert labels(shown) == {"phase: backward", "main  train.py:9", "train  train.py:21"}
    assert "1 ms per step" in shown.text("#current")


def test_keys(shown: Opened) -> None:
    labels(shown)
    page = shown.page
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    first = shown.text("#current strong")
    page.keyboard.press("ArrowLeft")
    assert {first, shown.text("#current strong")} == {"main threads", "loader workers"}
    page.keyboard.press("Enter")
    assert width(shown, shown.text("#current strong")) == pytest.approx(width(shown, "everything"))
    page.keyboard.press("t")
    assert page.locator("#tree").input_value() == "1"
    page.keyboard.press("/")
    page.keyboard.type("main")
    assert page.locator("#search").input_value() == "main"


def test_icicle_and_flame(shown: Opened) -> None:
    def top(name: str) -> float:
        return float(box(shown, name).bounding_box()["y"])

    labels(shown)
    shown.until(lambda: top("everything") < top("select"))
    shown.page.click("#flame")
    shown.until(lambda: top("everything") > top("select"))
    shown.page.click("#icicle")
    shown.until(lambda: top("everything") < top("select"))


@pytest.mark.parametrize("dark", [False, True])
def test_the_theme_follows_the_reader(tmp_path: Path, open_page: Open, dark: bool) -> None:
    file = tmp_path / "run.html"
    file.write_text(flame_page.render(flame_graph(run())), encoding="utf-8")
    opened = open_page(file, dark=dark)
    background = "getComputedStyle(document.body).backgroundColor"
    first = opened.page.evaluate(background)
    assert first == ("rgb(18, 22, 28)" if dark else "rgb(255, 255, 255)")
    opened.page.click("#theme")
    assert opened.page.evaluate(background) != first


def test_a_difference_shows_both_sides(tmp_path: Path, open_page: Open) -> None:
    before = context([stack("main", "old", samples=6), stack("main", "same", samples=4)], run={"name": "before"})
    after = context([stack("main", "new", samples=6), stack("main", "same", samples=4)], run={"name": "after"})
    file = tmp_path / "diff.html"
    file.write_text(flame_page.render(flame_diff(after, before)), encoding="utf-8")
    opened = open_page(file)
    assert labels(opened) == {"everything", "main  train.py:1", "new  train.py:1", "same  train.py:1"}
    box(opened, "new").locator("rect").hover()
    assert "6 samples in after, 0 in before" in opened.text("#tip")
    assert "new: +6" in opened.text("#tip")
    opened.page.select_option("#side", label="widths of before")
    assert labels(opened) == {"everything", "main  train.py:1", "old  train.py:1", "same  train.py:1"}
    assert {"grown", "shrunk", "new", "gone"} <= set(opened.text("#legend").split("\n"))


def test_a_deep_and_a_wide_tree_can_be_walked(tmp_path: Path, open_page: Open) -> None:
    deep = stack("main", *["ping:1", "pong:2"] * 2048, samples=500)
    wide = [stack("main", f"leaf_{number}:3") for number in range(3000)]
    file = tmp_path / "deep.html"
    file.write_text(flame_page.render(flame_graph(context([deep, *wide]))), encoding="utf-8")
    opened = open_page(file)
    assert "ping  train.py:1" in labels(opened)
    assert "14.3 % of the tree" in search(opened, "pong")
    opened.page.keyboard.press("Escape")


def test_the_picture_zooms_and_is_harmless(tmp_path: Path, open_page: Open) -> None:
    graph = flame_graph(run())
    file = tmp_path / "run.svg"
    file.write_text(svg.render(graph, tree(graph)), encoding="utf-8")
    opened = open_page(file)
    fetch = opened.page.locator("g.box[data-n='fetch'] rect")
    before = float(fetch.get_attribute("width"))
    opened.page.locator("g.box[data-n='fetch']").click()
    assert float(fetch.get_attribute("width")) == pytest.approx(1200, abs=1)
    opened.page.locator("#reset").click()
    assert float(fetch.get_attribute("width")) == pytest.approx(before, abs=0.6)
    titles = opened.page.evaluate("[...document.querySelectorAll('g.box title')].map(e => e.textContent)")
    assert any(EVIL in title for title in titles)
    assert opened.page.evaluate("document.scripts ? document.querySelectorAll('script').length : 1") == 1
