"""The table of addresses: which document of `handlers.py` is where, and the files of the front end.

Files are sent from a list made at the start, so no path of a request ever reaches the file system. Below stand the
connections that have not said yet what they want: so many of them, and no longer than a moment. Whoever can reach the
port can open connections without a token. One that does not send a request in time is closed; of too many the oldest
goes, which is never the user's, whose browser sends at once.
"""

from __future__ import annotations

import asyncio
import mimetypes
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from stepscope.dashboard import bundle
from stepscope.dashboard.server.handlers import Asked, Handlers
from stepscope.dashboard.server.security import (
    JSON,
    STATUS,
    Guard,
    Policy,
    StillPreparing,
    encoded,
    failure,
    unexpected,
)
from stepscope.errors import EnvironmentRefusal, StepscopeError
from stepscope.report.escape import one_line

TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
REVALIDATE = {"cache-control": "no-cache"}  # files of the front end: kept, but asked after each time
PIECE = 2**20  # bytes of a file that are sent at once
_WORDS = {404: "there is nothing at this address", 405: "this server only reads: GET and HEAD"}


def application(handlers: Handlers, policy: Policy, files: Path | None) -> Guard:
    """The ASGI application; `files` is the folder of the built front end, None where there is none."""
    documents = {
        "/api/runs": handlers.runs,
        "/api/runs/{run}": handlers.head,
        "/api/runs/{run}/live": handlers.following,
        "/api/runs/{run}/pages/{page}": handlers.page,
        "/api/runs/{run}/timeline": handlers.timeline,
        "/api/runs/{run}/timeline/search": handlers.search,
        "/api/runs/{run}/slices/{slice}": handlers.slice,
    }
    found = [path for path in files.rglob("*") if path.is_file()] if files is not None else []
    names = [path.relative_to(files).as_posix() for path in sorted(found) if files is not None]
    routes = [
        Route("/", _file(files, bundle.INDEX)),
        *(Route(path, _document(make)) for path, make in documents.items()),
        Route("/api/runs/{run}/slice", _perfetto(handlers)),
        *(Route(f"/{name}", _file(files, name)) for name in names if name != bundle.INDEX),
    ]
    failures: Any = {StepscopeError: _failed, HTTPException: _refused, Exception: _broken}
    made = Starlette(routes=routes, exception_handlers=failures)
    made.router.redirect_slashes = False  # it would send people to where a proxy is not
    return Guard(made, policy)


def _document(make: Callable[[Asked], Any]) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        made = make({**request.query_params, **request.path_params})
        return Response(made if isinstance(made, bytes) else encoded(made), media_type=JSON)

    return endpoint


def _perfetto(handlers: Handlers) -> Callable[[Request], Response]:
    def pieces(file: IO[bytes]) -> Iterator[bytes]:
        with file:
            yield from iter(partial(file.read, PIECE), b"")

    def endpoint(request: Request) -> Response:
        with tempfile.TemporaryDirectory(prefix="stepscope-slice-") as folder:
            path = handlers.perfetto({**request.query_params, **request.path_params}, Path(folder))
            file = path.open("rb")  # with its folder it is gone, and from the disk when it is closed
        named = {"content-disposition": f'attachment; filename="{path.name}"'}
        return StreamingResponse(pieces(file), media_type="application/gzip", headers=named)

    return endpoint


def _file(files: Path | None, name: str) -> Callable[[Request], Response]:
    kind = TYPES.get(Path(name).suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"

    def endpoint(_: Request) -> Response:
        if files is None:
            raise EnvironmentRefusal(bundle.missing())
        return FileResponse(files / name, media_type=kind, headers=REVALIDATE)

    return endpoint


def _failed(_: Request, error: Any) -> Response:
    if isinstance(error, StillPreparing):
        return Response(encoded(error.document), status_code=202, media_type=JSON)
    status = next(status for kind, status in STATUS.items() if isinstance(error, kind))
    return Response(failure(str(error)), status_code=status, media_type=JSON)


def _refused(_: Request, error: Any) -> Response:
    text = _WORDS.get(error.status_code, "this request cannot be answered")
    return Response(failure(text), status_code=error.status_code, media_type=JSON, headers=error.headers)


def _broken(request: Request, error: Exception) -> Response:
    print(f"stepscope view: {one_line(request.url.path)}: {unexpected(error)}", file=sys.stderr, flush=True)
    return Response(failure(unexpected(error)), status_code=500, media_type=JSON)


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
