"""The table of addresses: which document of `handlers.py` is where, and the files of the front end.

Files are sent from a list made at the start, so no path of a request ever reaches the file system. Below stand the
connections that have not said yet what they want: so many of them, and no longer than a moment. Whoever can reach the
port can open connections without a token. One that does not send a request in time is closed; of too many the oldest
goes, which is never the user's, whose browser sends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from stepscope.dashboard import bundle
from stepscope.dashboard.server.handlers import Handlers
from stepscope.dashboard.server.security import Guard, Policy, StillPreparing, encoded, failure, status_of, unexpected
from stepscope.errors import EnvironmentRefusal, StepscopeError
from stepscope.report.escape import one_line

JSON = "application/json"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
REVALIDATE = {"cache-control": "no-cache"}  # files of the front end: kept, but asked after each time
_WORDS = {404: "there is nothing at this address", 405: "this server only reads: GET and HEAD"}


def application(handlers: Handlers, policy: Policy, files: Path | None) -> Guard:
    """The ASGI application; `files` is the folder of the built front end, None where there is none."""
    routes = [
        Route("/", _file(files, bundle.INDEX)),
        Route("/api/runs", _document(lambda request: handlers.runs(_params(request)))),
        Route("/api/runs/{run}", _document(lambda request: handlers.head(_part(request, "run")))),
        Route("/api/runs/{run}/live", _document(lambda request: handlers.following(_part(request, "run")))),
        Route(
            "/api/runs/{run}/pages/{page}",
            _document(lambda request: handlers.page(_part(request, "run"), _part(request, "page"), _params(request))),
        ),
        Route("/api/runs/{run}/timeline", _document(lambda r: handlers.timeline(_part(r, "run"), _params(r)))),
        Route("/api/runs/{run}/timeline/search", _document(lambda r: handlers.search(_part(r, "run"), _params(r)))),
        Route(
            "/api/runs/{run}/slices/{slice}", _document(lambda r: handlers.slice(_part(r, "run"), _part(r, "slice")))
        ),
        Route("/api/runs/{run}/slice", _perfetto(handlers)),
        *(Route(f"/{name}", _file(files, name)) for name in _names(files) if name != bundle.INDEX),
    ]
    failures: Any = {StepscopeError: _failed, HTTPException: _refused, Exception: _broken}
    made = Starlette(routes=routes, exception_handlers=failures)
    made.router.redirect_slashes = False  # it would send people to where a proxy is not
    return Guard(made, policy)


def _document(make: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """An endpoint that answers with what `make` returns; Starlette calls it on a thread."""

    def endpoint(request: Request) -> Response:
        made = make(request)
        return Response(made if isinstance(made, bytes) else encoded(made), media_type=JSON)

    return endpoint


def _perfetto(handlers: Handlers) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        with contextlib.ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="stepscope-slice-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            path = handlers.perfetto(_part(request, "run"), _params(request), folder)
            stack.pop_all()  # the answer takes it away
        return _Passing(path, media_type="application/gzip", filename=path.name)

    return endpoint


class _Passing(FileResponse):
    """A file that is taken away, with its folder, however sending it ends."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            shutil.rmtree(Path(self.path).parent, ignore_errors=True)


def _names(files: Path | None) -> list[str]:
    """The files of the front end, relative to its folder."""
    if files is None:
        return []
    return sorted(path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file())


def _file(files: Path | None, name: str) -> Callable[[Request], Response]:
    kind = TYPES.get(Path(name).suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"

    def endpoint(_: Request) -> Response:
        if files is None:
            raise EnvironmentRefusal(bundle.missing())
        return FileResponse(files / name, media_type=kind, headers=REVALIDATE)

    return endpoint


def _part(request: Request, name: str) -> str:
    return str(request.path_params[name])


def _params(request: Request) -> dict[str, str]:
    return dict(request.query_params)


# --------------------------------------------------------------------------------------------------------- errors


def _failed(_: Request, error: Any) -> Response:
    if isinstance(error, StillPreparing):
        return Response(encoded(error.document), status_code=202, media_type=JSON)
    return Response(failure(str(error)), status_code=status_of(error), media_type=JSON)


def _refused(_: Request, error: Any) -> Response:
    text = _WORDS.get(error.status_code, "this request cannot be answered")
    return Response(failure(text), status_code=error.status_code, media_type=JSON, headers=error.headers)


def _broken(request: Request, error: Exception) -> Response:
    """A mistake of ours: a line for the one who asked, and one for whoever looks at the terminal."""
    print(f"stepscope view: {one_line(request.url.path)}: {unexpected(error)}", file=sys.stderr, flush=True)
    return Response(failure(unexpected(error)), status_code=500, media_type=JSON)


# ---------------------------------------------------------------------------------------------------- connections

REQUEST_S = 10.0  # to send a request's headers
MAX_WAITING = 100  # connections; the usual limit of open files is 1,024


def protocol() -> Any:
    """What a server of uvicorn makes of a connection; those of one server share their places."""
    return partial(_Connection, {})


class _Connection(H11Protocol):
    """HTTP, with a deadline for the headers of each request."""

    def __init__(self, places: dict[_Connection, asyncio.TimerHandle], **given: Any) -> None:
        super().__init__(**given)
        self._places = places  # oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait()
        else:
            self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self in self._places or self.transport.is_closing():
            return
        self._places[self] = self.loop.call_later(REQUEST_S, self.transport.abort)
        if len(self._places) > MAX_WAITING:
            oldest = next(iter(self._places))
            oldest._leave()  # at once: several may come before its loss is told
            oldest.transport.abort()

    def _leave(self) -> None:
        timer = self._places.pop(self, None)
        if timer is not None:
            timer.cancel()
