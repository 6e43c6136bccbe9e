"""The flame graph in a real Chromium: trees, zoom, search, keys, links, the table behind it, differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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


def labels(view: View) -> list[str]:
    return [text for text in view.page.locator(".d3-flame-graph-label").all_inner_texts() if text]


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
