"""All pages in a real Chromium, on all kinds of runs; and what the shell and the plain blocks do when they are used."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.dashboard import blocks
from stepscope.dashboard.pages import PAGES
from stepscope.dashboard.server import prepare
from tests.dashboard.browser import COLOURS, Look, View
from tests.dashboard.client import Dashboard
from tests.dashboard.served_runs import Growing

Served = Callable[[str], str]
SCREENS = {"overview": 1, "steps": 2, "system": 2}  # of 1280 x 720 that a page may need
TITLES = {key: page.title for key, page in PAGES.items()}
CLOSELY = {"findings", "flame", "metrics", "timeline"}  # whose own tests ask axe of more than is shown at first


@pytest.mark.parametrize(
    "name",
    [
        *("tb_plugin", "fuzzed"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("demo", "growing", "empty")),
    ],
)
def test_every_page_of_every_run(name: str, dashboard: Dashboard, served: Served, look: Look) -> None:
    view = look(dashboard.page(served(name), "findings")).ready()
    view.until(lambda: len(view.pages()) == len(TITLES))
    assert view.pages() == TITLES
    for page in TITLES:
        _visit(view, page)
        # whatever a name from the run says, it is text
        assert view.page.locator("main :is(script, img, iframe), main a[href^='javascript']").count() == 0, page
    if name == "fuzzed":
        assert "<script>alert(1)" in view.text("main")  # the run's command, as it was given


def _visit(view: View, page: str) -> None:
    """Opens a page and checks what holds for all of them."""
    view.open(page)
    assert view.page.locator("h1").all_inner_texts() == [TITLES[page]]
    assert view.page.locator("[role=alert]").all_inner_texts() == [], page
    assert view.page.locator("main .block").count() > 0, page
    assert _sizes(view)[0] <= 1280, page
    assert _headings_in_order(view), page
    marked = view.page.locator(f'nav .empty a[href$="/{page}"]').count()
    assert view.page.locator("main .empty").count() >= marked, page
    if page in SCREENS:
        view.page.locator("nav details").evaluate_all("found => found.forEach((each) => { each.open = true; })")
        assert _sizes(view.sized(1280, 720))[1] <= 720 * SCREENS[page], page
    assert _sizes(view.sized(390, 844))[0] <= 390, page
    view.sized(1280, 800)


def _sizes(view: View) -> tuple[int, int]:
    """How wide and how high the whole page is, in pixels."""
    width, height = view.page.locator("html").evaluate("root => [root.scrollWidth, root.scrollHeight]")
    return width, height


def _headings_in_order(view: View) -> bool:
    """No level is left out on the way down."""
    tags = view.page.locator("main :is(h1, h2, h3, h4, h5)")
    levels = [int(tag[1]) for tag in tags.evaluate_all("found => found.map((tag) => tag.tagName)")]
    return levels[:1] == [1] and all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_accessible(dashboard: Dashboard, served: Served, look: Look) -> None:
    """Empty pages are all of one block: the first of them stands for the others."""
    view = look(dashboard.page(served("small"), "findings"), axe=True).ready()
    view.until(lambda: len(view.pages()) == len(TITLES))
    found = {}
    for page in TITLES.keys() - {*list(view.pages(".empty"))[1:], *CLOSELY}:
        found[page] = view.open(page).violations()
        view.dark(True)
        found[page] += view.violations(COLOURS)
        view.dark(False)
    assert {page: wrong for page, wrong in found.items() if wrong} == {}


def test_list_of_runs(dashboard: Dashboard, served: Served, look: Look) -> None:
    for name in ("small", "empty"):
        served(name)
    view = look(f"{dashboard.address}#/").ready()
    assert view.text("h1") == "Runs"
    rows = view.page.locator("tbody tr")
    assert rows.count() >= 2

    view.page.get_by_label("Search runs").fill("small")
    view.until(lambda: rows.count() == 1)
    assert "q=small" in view.page.url
    view.page.get_by_role("link", name="small").click()
    view.ready()
    assert view.text("h1") == "Overview"


def test_scope_follows_from_page_to_page(dashboard: Dashboard, served: Served, look: Look) -> None:
    view = look(dashboard.page(served("small"), "steps")).ready()
    view.page.locator("header").get_by_label("Worker").select_option(index=1)
    view.ready()
    first = view.page.locator("header").get_by_label("Steps", exact=True)
    first.fill("10")
    first.press("Tab")
    last = view.page.locator("header").get_by_label("to", exact=True)
    last.fill("19")
    last.press("Enter")
    view.until(lambda: "steps=10%3A19" in view.page.url)
    view.ready()
    view.open("findings")
    assert "steps=10%3A19" in view.page.url
    assert "worker=" in view.page.url
    assert view.asked("steps=10%3A19") > 0

    view.page.get_by_role("button", name="All steps").click()
    view.until(lambda: "steps=" not in view.page.url)
    view.page.go_back()
    view.until(lambda: "steps=10%3A19" in view.page.url and last.input_value() == "19")


def test_table_sorts_filters_saves_and_is_restored_by_its_link(
    dashboard: Dashboard, served: Served, look: Look
) -> None:
    view = look(dashboard.page(served("tb_plugin"), "operators")).ready()
    card = _long_table(view)
    rows, head = card.locator("tbody tr"), card.locator("thead th.number").first
    came = rows.all_inner_texts()
    card.get_by_placeholder("Filter rows").fill("conv")
    view.until(lambda: 0 < rows.count() < len(came) and "filter%3Aconv" in view.page.url)
    assert all("conv" in text.lower() for text in rows.all_inner_texts())
    for order in ("descending", "ascending"):
        head.get_by_role("button").first.click()
        view.until(lambda order=order: head.get_attribute("aria-sort") == order)  # type: ignore[misc]

    with view.page.expect_download() as waited:
        card.get_by_role("button", name="CSV of").click()
    lines = list(csv.reader(Path(waited.value.path()).read_text().splitlines()))
    assert len(lines) == rows.count() + 1
    assert any("[ns]" in name for name in lines[0])

    again = look(dashboard.address + view.page.url[view.page.url.index("#") :]).ready()
    restored = _long_table(again)
    assert restored.locator("thead th.number").first.get_attribute("aria-sort") == "ascending"
    assert restored.locator("tbody tr").all_inner_texts() == rows.all_inner_texts()


def _long_table(view: View) -> Any:
    """The first table with so many rows that they can be filtered."""
    return view.page.locator("section.table").filter(has=view.page.get_by_placeholder("Filter rows")).first


def test_what_is_not_there_says_so(dashboard: Dashboard, served: Served, look: Look) -> None:
    view = look(dashboard.page(served("small"), "findings")).ready()
    missing: list[str] = []
    view.page.on("response", lambda answer: missing.append(answer.url) if answer.status == 404 else None)
    view.go(dashboard.page(served("small"), "no-such-page").replace(dashboard.address, dashboard.url))
    view.until(lambda: view.page.locator("[role=alert]").count() == 1)
    view.open("steps")
    assert view.page.locator("[role=alert]").count() == 0
    view.go(dashboard.page("no-such-run", "findings").replace(dashboard.address, dashboard.url))
    view.until(lambda: view.page.locator("[role=alert]").count() == 1)
    view.page.wait_for_load_state("networkidle")
    assert len(missing) >= 2
    view.until(lambda: len(view.wrong) >= len(missing))  # the browser's own line about each answer may come after it
    assert [wrong for wrong in view.wrong if "404" not in wrong] == []
    view.wrong.clear()


def test_a_run_that_goes_on_is_followed_to_its_end(
    tmp_path: Path, dashboard_of: Callable[..., Dashboard], look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PAUSE", "AT_LEAST_S"):
        monkeypatch.setattr(prepare, name, 0.0)  # not to wait many times what a slow machine needs to read it again
    growing = Growing(tmp_path)
    try:
        view = look(dashboard_of(tmp_path).address).ready()
        status = view.page.locator("section.status")
        view.until(lambda: "30 steps" in status.inner_text())
        figures = view.open("steps").page.locator("main dl").first
        assert "41" not in figures.inner_text()
        assert "running" in view.text("header")
        growing.add(12)
        view.until(lambda: "42 steps" in status.inner_text())
        view.until(lambda: "41\n" in figures.inner_text())  # without the warm-up; the page itself is made again
        growing.end()
        view.until(lambda: "finished" in view.text("header"))

        def nobody_asks() -> bool:
            before = view.asked("/live")
            view.page.wait_for_timeout(3000)
            return view.asked("/live") == before

        view.until(nobody_asks)
    finally:
        growing.close()


def test_tree_folds_and_keeps_its_order(show_made_up: Callable[..., View]) -> None:
    tree = [("a", 0, 1), ("b", 1, 5), ("c", 2, 4), ("d", 1, 9), ("e", 0, 7)]
    rows = [{"name": name, "depth": depth, "time_ns": time} for name, depth, time in tree]
    columns = [blocks.column("name", "Name"), blocks.column("time_ns", "Time", "ns", bar=True)]
    tree_ = blocks.table("made", "Made up", columns, rows, limit=9, tree=True)
    view = show_made_up("operators", [tree_])
    table = view.page.locator("section.table")

    def names() -> list[str]:
        return [text.strip("▸▾ \n\t") for text in table.locator("tbody th").all_inner_texts()]

    assert names() == ["a", "b", "d", "e"]
    fold = table.get_by_role("button", name="What is inside b")
    assert fold.get_attribute("aria-expanded") == "false"
    fold.press("Enter")
    view.until(lambda: names() == ["a", "b", "c", "d", "e"])
    table.get_by_title("Sort by Time").click()
    view.until(lambda: names() == ["e", "a", "d", "b", "c"])
    table.get_by_role("button", name="What is inside a").click()
    view.until(lambda: names() == ["e", "a"])


def test_a_block_that_cannot_be_drawn_leaves_the_others(show_made_up: Callable[..., View]) -> None:
    broken = {"kind": "table", "id": "broken", "title": "Broken", "columns": None}
    view = show_made_up("operators", [broken, blocks.text("Still there")])
    assert "Still there" in view.text("main")
    assert view.page.locator("main [role=alert]").count() == 1
    assert len(view.wrong) == 1  # the console says which block it was
    assert "kind table failed" in view.wrong[0]
    view.wrong.clear()
