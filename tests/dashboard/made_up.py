"""A dashboard of documents that a test made up: the built front end and its policy, without runs behind it.

`MadeUp(pages)` serves the pages of one run.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from stepscope.dashboard import bundle
from stepscope.dashboard.pages import ONLY as RUN
from stepscope.dashboard.pages import PAGES, document, head
from stepscope.dashboard.server.security import CONTENT_POLICY
from tests.dashboard.browser import Look, View

_LIVE = {
    "schema": "stepscope.live/1",
    "state": "finished",
    "revision": 0,
    "steps": 100,
    "last_step_ms": None,
    "mean_ms": None,
    "text": "It has ended.",
    "again_s": None,
}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


class MadeUp:
    """A server on a free port to be closed."""

    def __init__(self, pages: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self._documents = {
            f"runs/{RUN}": head(
                [PAGES[key] for key in pages], name="made up", kind="run", steps={"first": 0, "last": 99}
            ),
            **{f"runs/{RUN}/pages/{key}": document(key, list(blocks)) for key, blocks in pages.items()},
        }
        self._documents |= {f"runs/{RUN}/live": _LIVE, "runs": {"schema": "stepscope.runs/1", "runs": [], "total": 0}}
        made_up = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                made_up._answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def page(self, page: str, query: str = "") -> str:
        """The address of a page."""
        return f"http://127.0.0.1:{self._server.server_port}/#/run/{RUN}/{page}{query}"

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = urlsplit(request.path).path.lstrip("/") or bundle.INDEX
        if path.startswith("api/"):
            document = self._documents.get(path.removeprefix("api/"))
            body = json.dumps(document or {"schema": "stepscope.error/1", "error": "not made up"}).encode()
            status, kind = (200 if document else 404), "application/json"
        else:
            status, kind, body = 200, _TYPES[Path(path).suffix], (bundle.FOLDER / path).read_bytes()
        request.send_response(status)
        request.send_header("Content-Type", f"{kind}; charset=utf-8")
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Content-Security-Policy", CONTENT_POLICY)
        request.end_headers()
        request.wfile.write(body)


@pytest.fixture
def show_made_up(look: Look) -> Iterator[Callable[..., View]]:
    """Shows these blocks as a page of a run that has one more; options are those of `look`."""
    servers: list[MadeUp] = []

    def show(page: str, blocks: Sequence[Mapping[str, Any]], query: str = "", **options: Any) -> View:
        other = [{"kind": "text", "text": "another page", "tone": "plain"}]
        servers.append(MadeUp({"findings": other, "steps": other, page: blocks}))
        return look(servers[-1].page(page, query), **options).ready()

    yield show
    for server in servers:
        server.close()
