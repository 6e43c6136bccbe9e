"""Documents that a test made up, shown by the built front end under its policy, without runs or a server behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from stepscope.dashboard import bundle
from stepscope.dashboard.pages import ONLY as RUN
from stepscope.dashboard.pages import PAGES, document, head
from stepscope.dashboard.server.security import CONTENT_POLICY
from tests.dashboard.browser import Look, View

ADDRESS = "http://made.up/"
_LIVE = {
    "schema": "stepscope.live/1",
    "state": "finished",
    "revision": 0,
    "steps": 100,
    "text": "It has ended.",
    **dict.fromkeys(("last_step_ms", "mean_ms", "again_s")),
}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


def answers(pages: Mapping[str, Sequence[Mapping[str, Any]]]) -> Callable[[Any], None]:
    """What a browser gets instead of a server's answers: these pages, of one run, and the front end."""
    shown = head([PAGES[key] for key in pages], name="made up", kind="run", steps={"first": 0, "last": 99})
    documents = {
        "runs": {"schema": "stepscope.runs/1", "runs": [], "total": 0},
        f"runs/{RUN}": shown,
        f"runs/{RUN}/live": _LIVE,
        **{f"runs/{RUN}/pages/{key}": document(key, list(blocks)) for key, blocks in pages.items()},
    }

    def answer(route: Any) -> None:
        path = urlsplit(route.request.url).path.lstrip("/") or bundle.INDEX
        headers = {"Content-Security-Policy": CONTENT_POLICY}
        if path.startswith("api/"):
            found = documents.get(path.removeprefix("api/"))
            error = {"schema": "stepscope.error/1", "error": "not made up"}
            route.fulfill(status=200 if found else 404, json=found or error, headers=headers)
        else:
            headers["Content-Type"] = f"{_TYPES[Path(path).suffix]}; charset=utf-8"
            route.fulfill(body=(bundle.FOLDER / path).read_bytes(), headers=headers)

    return answer


@pytest.fixture
def show_made_up(look: Look) -> Callable[..., View]:
    """Shows these blocks as a page of a run that has one more; options are those of `look`."""

    def show(page: str, blocks: Sequence[Mapping[str, Any]], query: str = "", **options: Any) -> View:
        other = [{"kind": "text", "text": "another page", "tone": "plain"}]
        made = answers({"findings": other, "steps": other, page: blocks})
        return look(f"{ADDRESS}#/run/{RUN}/{page}{query}", answer=made, **options).ready()

    return show
