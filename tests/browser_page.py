"""A real browser for pages that this package writes: Chromium of the system, driven by Playwright.

A page fixture opens files only, and fails its test on what no page of ours may do: write an error to the console, raise
in a script, open a dialog, or ask a network for anything.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

_T = TypeVar("_T")
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE_MS = 30_000


@dataclass
class Opened:
    """A page in the browser, and what it did wrong."""

    page: Any
    wrong: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.inner_text())

    def until(self, met: Callable[[], bool]) -> None:
        """Wait for what the page does in its own time. (Its policy forbids the driver's own way, which is `eval`.)"""
        end = time.monotonic() + PATIENCE_MS / 1000
        while not met():
            assert time.monotonic() < end, "the page did not get there"
            self.page.wait_for_timeout(20)

    def settled(self, look: Callable[[], _T]) -> _T:
        """What `look` sees once two looks in a row see the same: boxes grow into their widths."""
        seen = [look()]

        def same() -> bool:
            self.page.wait_for_timeout(60)
            seen.append(look())
            return seen[-1] == seen[-2]

        self.until(same)
        return seen[-1]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser, started once."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"needs one of {', '.join(PROGRAMS)}")
    with playwright.sync_playwright() as driver:
        # a container's root may not make the sandbox; the pages are our own
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Opened]]:
    """Opens a file; whatever a page of ours may not do fails the test at its end."""
    opened: list[Opened] = []
    contexts = []

    def open_file(path: Path, *, dark: bool = False, width: int = 1200) -> Opened:
        context = chromium.new_context(
            viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light", offline=True
        )
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        result = Opened(page)
        page.on("console", lambda message: result.wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: result.wrong.append(f"script: {error}"))
        page.on("dialog", lambda dialog: (result.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "request",
            lambda request: None if request.url == path.as_uri() else result.wrong.append(f"request: {request.url}"),
        )
        page.goto(path.as_uri())
        opened.append(result)
        return result

    yield open_file
    for context in contexts:
        context.close()
    assert [wrong for each in opened for wrong in each.wrong] == []
