"""The page of ranks in a real Chromium: served and as a file, what is drawn, chosen, accessible, and only text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepscope import api
from stepscope.dashboard import bundle, single
from tests.browser_page import Opened
from tests.dashboard.browser import Look, View
from tests.dashboard.client import Dashboard
from tests.dashboard.test_charts_in_browser import COLOURS
from tests.reduced_runs import Made, reduced_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks") / "runs"
    reduced_run(made / "late", Made(ranks=96, stages=2, windows=20, missing=range(40, 48)))
    return made


@pytest.fixture(scope="module")
def shown(folder: Path) -> Iterator[Dashboard]:
    with Dashboard.start(folder) as dashboard:
        yield dashboard


@pytest.fixture
def ranks(shown: Dashboard, look: Look) -> Callable[..., View]:
    return lambda: look(shown.page(shown.id("late"), "ranks")).ready()


def drawn(view: Opened) -> bool:
    return len(view.page.locator("section.chart canvas").first.evaluate(COLOURS)) > 3


def test_the_ranks_of_a_host_are_asked_for_when_it_is_chosen(ranks: Callable[..., View]) -> None:
    view = ranks()
    view.until(lambda: drawn(view))
    assert view.page.get_by_text("88 of 96 ranks judged by the reduced tables of 11 hosts").is_visible()
    slider = view.page.locator("section.chart").first.get_by_role("slider")
    slider.focus()
    slider.press("Home")
    assert str(slider.get_attribute("aria-valuetext")).startswith("Step 0, node2 ")
    assert view.asked("by=") == 0
    view.page.get_by_label("Rows").select_option(label="the ranks of node2")
    view.until(lambda: view.parameter("by") == "host-1")
    view.ready()
    view.until(lambda: view.page.get_by_text(": rank 13, from step").count() == 1)
    assert view.asked("by=host-1") == 1


def test_a_file_shows_the_ranks_of_a_host_without_a_server(
    folder: Path, tmp_path: Path, open_page: Callable[..., Opened]
) -> None:
    if bundle.folder() is None:
        pytest.skip("needs the built front end: npm --prefix web run build")
    run = api.open_run(folder / "late", options=api.ReadOptions(cache=False, keep=False))
    file = tmp_path / "report.html"
    file.write_text(single.render(run, run.report()), encoding="utf-8")
    view = open_page(file)
    view.page.locator('nav a[href*="/ranks"]').first.click()
    view.until(lambda: view.page.get_by_label("Rows").count() == 1)
    view.page.get_by_label("Rows").select_option(label="the ranks of node2")
    view.until(lambda: view.page.get_by_text(": rank 13, from step").count() == 1)
    view.page.get_by_label("Rows").select_option(label="by host")
    view.until(lambda: view.page.get_by_text("What holds the others up").count() == 1)
