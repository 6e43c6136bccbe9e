"""A dashboard of documents that a test made up: the built front end and its policy, without runs behind it.

`MadeUp(blocks)` serves one page of one run; `pages` are further ones. With `embedded` the same documents stand in the
page, as in a single-file report.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stepscope.dashboard import bundle
from stepscope.dashboard.server.security import CONTENT_POLICY

RUN = "this"
PAGES = ("findings", "steps")
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
    """A server on a free port, to be closed. `asked` are the documents that were asked for, with their queries."""

    def __init__(self, pages: Mapping[str, Sequence[Mapping[str, Any]]], *, embedded: bool = False) -> None:
        self.asked: list[str] = []
        self._documents = {
            f"runs/{RUN}": _head(pages),
            **{f"runs/{RUN}/pages/{key}": _page(key, blocks) for key, blocks in pages.items()},
        }
        self._documents |= {f"runs/{RUN}/live": _LIVE, "runs": {"schema": "stepscope.runs/1", "runs": [], "total": 0}}
        self._embedded = embedded
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

    def page(self, page: str = PAGES[0], query: str = "") -> str:
        """The address of a page."""
        return f"http://127.0.0.1:{self._server.server_port}/#/run/{RUN}/{page}{query}"

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = urlsplit(request.path).path.lstrip("/") or bundle.INDEX
        if path.startswith("api/"):
            self.asked.append(request.path)
            document = self._documents.get(path.removeprefix("api/"))
            body = json.dumps(document or {"schema": "stepscope.error/1", "error": "not made up"}).encode()
            status, kind = (200 if document else 404), "application/json"
        else:
            status, kind, body = 200, _TYPES[Path(path).suffix], self._file(path)
        request.send_response(status)
        request.send_header("Content-Type", f"{kind}; charset=utf-8")
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Content-Security-Policy", CONTENT_POLICY)
        request.end_headers()
        request.wfile.write(body)

    def _file(self, path: str) -> bytes:
        folder = bundle.folder()
        assert folder is not None
        text = (folder / path).read_bytes()
        if path != bundle.INDEX or not self._embedded:
            return text
        data = {"schema": "stepscope.embedded/1", "run": RUN, "documents": self._documents}
        harmless = json.dumps(data).replace("<", "\\u003c")
        element = f'<script type="application/json" id="stepscope-data">{harmless}</script>'
        return text.replace(b"</body>", element.encode() + b"</body>")


def _head(pages: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "schema": "stepscope.run/1",
        "id": RUN,
        "name": "made up",
        "kind": "run",
        "state": "finished",
        "command": None,
        "started_ns": None,
        "revision": 0,
        "workers": [],
        "spans": [],
        "steps": {"first": 0, "last": 99},
        "pages": [{"key": key, "title": key.capitalize(), "group": "", "empty": False} for key in pages],
        "preparing": None,
        "error": None,
    }


def _page(key: str, blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scope = {"worker": None, "span": None, "steps": None, "follows": ["steps"], "note": None}
    return {
        "schema": "stepscope.page/1",
        "page": key,
        "title": key.capitalize(),
        "revision": 0,
        "scope": scope,
        "blocks": list(blocks),
    }
