"""The page of metrics in a real Chromium: what is drawn, chosen, laid over, and accessible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.browser import Look, View
from tests.dashboard.client import Dashboard
from tests.dashboard.test_charts_in_browser import COLOURS
from tests.dashboard.test_metrics_page import trained


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    folder = tmp_path_factory.mktemp("metrics") / "runs"
    trained(folder, "first")
    trained(folder, "second", higher=1.0)
    with Dashboard.start(folder) as dashboard:
        yield dashboard


@pytest.fixture
def metrics(shown: Dashboard, look: Look) -> Callable[..., View]:
    def open_page(name: str = "first", *, axe: bool = False, **params: str) -> View:
        return look(shown.page(shown.id(name), "metrics", **params), axe=axe).ready()

    return open_page


def chart(view: View, title: str) -> Any:
    return view.page.locator("section.chart").filter(has=view.page.get_by_role("heading", name=title, exact=True))


def pixels(view: View, title: str) -> dict[str, int]:
    found: dict[str, int] = chart(view, title).locator("canvas").evaluate(COLOURS)
    return found


def test_accessible_in_both_themes(metrics: Callable[..., View]) -> None:
    view = metrics(axe=True)
    view.until(lambda: len(pixels(view, "train/loss")) > 2)
    assert view.violations() == []
    view.page.emulate_media(color_scheme="dark")
    assert view.violations() == []
    small = metrics(axe=True, group="layers")
    assert small.violations() == []


def test_what_is_no_number_is_drawn_told_and_in_the_table(metrics: Callable[..., View]) -> None:
    view = metrics(group="train")
    loss = chart(view, "train/loss")
    slider = loss.get_by_role("slider")
    slider.focus()
    slider.press("Home")
    for _ in range(12):
        slider.press("PageDown")
    assert slider.get_attribute("aria-valuetext") == "Step 120, train/loss NaN"
    for _ in range(3):
        slider.press("PageDown")
    assert str(slider.get_attribute("aria-valuetext")).endswith(", checkpoint")
    loss.get_by_role("button", name="Table").click()
    table = view.page.locator("section.table").filter(has=view.page.get_by_role("heading", name="train/loss: values"))
    table.get_by_placeholder("Filter rows").fill("NaN")
    rows = table.locator("tbody tr")
    view.until(lambda: rows.count() == 1)
    assert rows.first.inner_text().split() == ["120", "NaN"]


def test_smoothing_and_other_runs_are_chosen(shown: Dashboard, metrics: Callable[..., View]) -> None:
    view = metrics(group="train")
    names = chart(view, "train/loss").get_by_role("list").first
    view.page.get_by_label("Smoothing").select_option("10")
    view.until(lambda: "smooth=10" in view.page.url and "mean of the last 10 values" in names.inner_text())
    view.page.get_by_label("Compare with").select_option(label="second")
    view.until(lambda: f"with={shown.id('second')}" in view.page.url and "train/loss: second" in names.inner_text())
    view.page.get_by_label("and with").first.wait_for()
    names.get_by_role("button", name="train/loss", exact=True).click()
    view.until(lambda: "off:0" in view.page.url.replace("%3A", ":"))

    view.page.get_by_label("Over", exact=True).select_option("time")
    view.until(lambda: "over=time" in view.page.url and chart(view, "train/loss").get_by_text("time since").count() > 0)


def test_a_range_of_a_curve_holds_on_all_pages(metrics: Callable[..., View]) -> None:
    view = metrics(group="train")
    first, last = chart(view, "train/loss").get_by_role("spinbutton").all()
    first.fill("90")
    last.fill("120")
    last.press("Enter")
    view.until(lambda: "steps=90%3A120" in view.page.url)
    view.ready()
    view.open("steps")
    view.page.get_by_role("link", name="Metrics").last.click()
    view.until(lambda: view.text("h1") == "Metrics" and "%3A120" in view.page.url)


def test_layers_are_drawn_and_told(metrics: Callable[..., View]) -> None:
    view = metrics(group="layers")
    heat = chart(view, "grad by layer")
    view.until(lambda: len(pixels(view, "grad by layer")) > 5)
    assert heat.get_by_text("crossed out: not finite").is_visible()
    slider = heat.get_by_role("slider")
    slider.focus()
    slider.press("Home")
    assert slider.get_attribute("aria-valuetext") == (
        "Step 0, blocks.0.weight 1, blocks.1.weight 0.1, blocks.2.weight 0.01"
    )
    assert heat.get_by_role("spinbutton").first.input_value() == "0"
    small = chart(view, "grad, layer by layer").get_by_role("img")
    assert small.count() == 3
    assert "1 not finite" in str(small.nth(1).get_attribute("aria-label"))


def test_the_page_without_scripts_shows_curves_and_crosses(tmp_path: Path) -> None:
    from stepscope.dashboard import static_page
    from stepscope.dashboard.static_page import Section
    from tests.dashboard.opened import page
    from tests.dashboard.plain_pages import Page

    blocks = page(trained(tmp_path), "metrics", embedded=True, limit=20)["blocks"]
    made = Page(static_page.render("a run", [Section("Metrics", blocks)]))
    assert made.open == []
    assert "×" in made.text
    assert "step 0 to 290; from light, 0.01, to dark, 30, logarithmic" in made.text
