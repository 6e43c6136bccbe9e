"""The dashboard in a real browser, under the policy that the server sends.

`look(address)` opens a page and returns a `View`; when its test ends it fails on what no page of ours may do: an error
or warning in the console (a broken policy is one), an exception in a script, a dialog, a request to another host.
`look(address, axe=True)` opens it without the policy, which would keep axe-core out; only `violations` needs that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

from stepscope.dashboard import bundle
from tests.browser_page import PATIENCE_MS, Opened

OWN_SCHEMES = ("data", "blob")
COLOURS = {"runOnly": ["color-contrast"], "resultTypes": ["violations"]}  # all that a theme changes
SHOWN = 4  # places of a violation


@dataclass
class View(Opened):
    """A page of the dashboard that is looked at. `requests` are the paths with queries that it asked its server for."""

    requests: list[str] = field(default_factory=list)

    def ready(self) -> View:
        """Waits until the page that was asked for is shown."""
        main = self.page.locator("main")
        self.until(lambda: main.count() == 1 and main.get_attribute("aria-busy") == "false" and self._has_content())
        return self

    def _has_content(self) -> bool:
        return bool(self.page.locator("main .blocks > .block, main [role=alert], main table, main .card").count())

    def pages(self, among: str = "") -> dict[str, str]:
        """Titles of the run's pages, or of those `among` them, by their keys, in order."""
        read = (
            "links => links.map(link => [link.getAttribute('href').split('?')[0].split('/').pop(), link.textContent])"
        )
        return dict(self.page.locator(f"nav {among} li a").evaluate_all(read))

    def open(self, page: str) -> View:
        """Opens a page of the same run by its link, as a user does."""
        link = self.page.locator(f'nav li a[href$="/{page}"], nav li a[href*="/{page}?"]').first
        title = link.text_content()
        if not link.is_visible():  # among the empty ones
            self.page.locator("nav summary").click()
        link.click()
        self.until(lambda: link.get_attribute("aria-current") == "page" and self.text("h1") == title)
        return self.ready()

    def go(self, address: str) -> View:
        """Opens another address, also one that only differs behind the `#`."""
        self.page.goto(address)
        return self.ready()

    def parameter(self, name: str) -> str | None:
        """What the address says of a choice on the page."""
        match = re.search(rf"[?&]{name}=([^&]*)", self.page.url.partition("#")[2])
        return match[1] if match else None

    def asked(self, part: str) -> int:
        """How often something with `part` in its path or query was asked for."""
        return sum(part in request for request in self.requests)

    def violations(self, options: Any = None) -> list[str]:
        """What axe-core finds on the page now; needs `look(..., axe=True)`."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page, options=options or {"resultTypes": ["violations"]}).response["violations"]
        return [
            f"{rule['impact']} {rule['id']}: {[node['html'][:200] for node in rule['nodes'][:SHOWN]]}" for rule in found
        ]

    def dark(self, on: bool) -> None:
        """In the theme that the system asks for."""
        self.page.emulate_media(color_scheme="dark" if on else "light")
        self.until(lambda: self.page.locator(f"html[data-theme={'dark' if on else 'light'}]").count() == 1)

    def sized(self, width: int, height: int) -> View:
        """In a window of this size, laid out anew."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return self


Look = Callable[..., View]


@pytest.fixture
def look(chromium: Any) -> Iterator[Look]:
    """Opens an address of a dashboard; see the module."""
    if bundle.folder() is None:
        pytest.skip("needs the built front end: npm --prefix web run build")
    views: list[View] = []
    contexts = []

    def open_view(address: str, *, axe: bool = False, answer: Callable[[Any], None] | None = None) -> View:
        context = chromium.new_context(viewport={"width": 1280, "height": 800}, bypass_csp=axe, accept_downloads=True)
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        if answer is not None:
            context.route("**/*", answer)
        view = View(context.new_page())
        _watch(view, urlsplit(address).netloc)
        views.append(view)
        view.page.goto(address)
        return view

    yield open_view
    for context in contexts:
        context.close()
    assert [wrong for view in views for wrong in view.wrong] == []


def _watch(view: View, host: str) -> None:
    def requested(request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.netloc == host:
            view.requests.append(f"{parts.path}?{parts.query}")
        elif parts.scheme not in OWN_SCHEMES:
            view.wrong.append(f"request: {request.url}")

    def said(message: Any) -> None:
        if message.type in ("error", "warning", "assert"):
            view.wrong.append(f"console: {message.text}")

    def dialog(shown: Any) -> None:
        view.wrong.append(f"dialog: {shown.message}")
        shown.dismiss()

    view.page.on("request", requested)
    view.page.on("console", said)
    view.page.on("pageerror", lambda error: view.wrong.append(f"script: {error}"))
    view.page.on("dialog", dialog)
