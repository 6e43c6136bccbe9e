"""Which requests are answered: those to our own name, with the token, that only read.

`Policy.judge` sees only what a request says, and before anything else looks at it. A page of another site
that a browser is led to believe lies at our address (DNS rebinding) sends its own name as `Host`; other users of the
machine do not know the token; a path that is not made of plain names is nobody's. Below stand the answers that are no
document of a run: which status an error has, and how documents become bytes.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlencode

import msgspec
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.responses import Response

from stepscope.errors import NotThere, StepscopeError, UnreadableInputError, UsageError
from stepscope.report.escape import one_line

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
METHODS = ("GET", "HEAD")
JSON = "application/json"
TOKEN = "token"  # of the query
MAX_FIELDS = 50  # of a query
MAX_QUERY = 8_000
MAX_AT_ONCE = 200  # requests with the token that are being answered
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HTTP_PORT = "80"  # what a Host without a port means

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
HEADERS = (
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
NO_STORE = (b"cache-control", b"no-store")

_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9](?:[a-z0-9._-]{0,252}[a-z0-9])?)(?::([0-9]{1,5}))?")
_PATH = re.compile(r"/(?:[A-Za-z0-9._~-]+/)*[A-Za-z0-9._~-]*")
_DOTS = (".", "..")
_IN_PATHS = "/@~:+,"  # what browsers leave as it is in a path


class Policy(Struct, frozen=True):
    """What a server answers.

    Attributes:
        token: what a request must carry.
        port: ours; it is part of our name.
        hosts: further names, each "name" (at any port) or "name:port", in lower case.
        base_path: where the browser sees us, beginning and ending with a slash.
    """

    token: str
    port: int
    hosts: frozenset[str] = frozenset()
    base_path: str = "/"

    @property
    def cookie(self) -> str:
        """The cookie's name: servers of one machine differ by their ports, which cookies do not tell apart."""
        return f"stepscope-{self.port}"

    def judge(self, method: str, raw_path: bytes, query: bytes, headers: Headers) -> str:
        """The path below the base of a request that is answered; `headers` by lower-case name, as ASGI has them.

        Raises `HTTPException` with a line for the one who sent it, or with the address to ask instead.
        """
        self._check_host([value for name, value in headers if name == b"host"])
        fields = _fields(query)
        given = [value for name, value in fields if name == TOKEN]
        by_query = any(self._is_token(value) for value in given)
        if not by_query and not any(self._is_token(value) for value in self._carried(headers)):
            raise HTTPException(403, "no valid token; open the address that `stepscope view` printed")
        if method not in METHODS:
            raise HTTPException(405, "this server only reads: GET and HEAD", {"allow": ", ".join(METHODS)})
        path = self._below(raw_path)
        if given or not path:
            rest = [(name, value) for name, value in fields if name != TOKEN]
            kept = f"{self.cookie}={self.token}; Path={quote(self.base_path, safe=_IN_PATHS)}; HttpOnly; SameSite=Lax"
            location = {"location": _same_place(raw_path, rest, path)}
            raise HTTPException(303, headers={**location, **({"set-cookie": kept} if by_query else {})})
        return path

    def _check_host(self, hosts: Sequence[bytes]) -> None:
        match = _HOST.fullmatch(hosts[0].decode("latin-1").lower()) if len(hosts) == 1 else None
        if match is None:
            raise HTTPException(421, "the request does not say which host it is for")
        name, port = match[1], match[2] or HTTP_PORT
        if not (name in LOOPBACK and port == str(self.port)) and not self.hosts & {name, f"{name}:{port}"}:
            hint = f"start it with --allow-host {match[0]} if it should"
            raise HTTPException(421, f"this server does not go by that name; {hint}")

    def _carried(self, headers: Headers) -> Iterable[str]:
        for name, value in headers:
            text = value.decode("latin-1")
            if name == b"authorization" and text[:7].lower() == "bearer ":
                yield text[7:].strip()
            if name == b"cookie":
                pairs = (part.strip().partition("=") for part in text.split(";"))
                yield from (value.strip('"') for key, _, value in pairs if key == self.cookie)

    def _is_token(self, value: str) -> bool:
        return secrets.compare_digest(value.encode("utf-8", "surrogateescape"), self.token.encode())

    def _below(self, raw_path: bytes) -> str:
        """The path without the base, "" for the base without its last slash.

        A proxy may have taken the base off, so a path without it is one of ours too.
        """
        path = unquote(raw_path.decode("latin-1"))
        if path and path == self.base_path[:-1]:
            return ""
        if path.startswith(self.base_path):
            path = path[len(self.base_path) - 1 :]
        if _PATH.fullmatch(path) is None or any(part in _DOTS for part in path.split("/")):
            raise HTTPException(400, "not an address of this server")
        return path


def parse_hosts(texts: Iterable[str]) -> frozenset[str]:
    """Names of `--allow-host`, several separated by commas; raises `UsageError`."""
    found = set()
    for text in (part.strip().lower() for given in texts for part in given.split(",")):
        if _HOST.fullmatch(text) is None:
            raise UsageError(f"--allow-host {text}: not a host; give its name alone, e.g. --allow-host hub.example.org")
        found.add(text)
    return frozenset(found)


def parse_base_path(text: str) -> str:
    """ "user/ann/proxy/6107" with a slash on either side; raises `UsageError`."""
    path = "/" + text.strip("/") + "/" if text.strip("/") else "/"
    if any(part in _DOTS for part in path.split("/")) or re.search(r"[\x00-\x20\x7f?#\\]|//|://", path):
        raise UsageError(f"--base-path {text}: not a path; give what stands between host and page, e.g. /user/ann/6107")
    return unquote(path)


def _fields(query: bytes) -> list[tuple[str, str]]:
    if len(query) <= MAX_QUERY:
        with contextlib.suppress(ValueError):
            return parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    raise HTTPException(400, "the address is too long, or its query cannot be read")


def _same_place(raw_path: bytes, fields: Sequence[tuple[str, str]], path: str) -> str:
    """A reference from an address to itself with another query; it holds whatever prefix a proxy shows."""
    last = unquote(raw_path.decode("latin-1")).rpartition("/")[2]
    name = quote(last, safe="") + ("" if path else "/")
    return f"./{name}" + (f"?{urlencode(fields)}" if fields else "")


class Guard:
    """The outermost layer of the application: refuses, redirects, and puts the headers on every answer."""

    def __init__(self, application: Any, policy: Policy) -> None:
        self._application = application
        self._policy = policy
        self._running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request; anything that is no HTTP is closed."""
        if scope["type"] != "http":
            return
        protected, headers = _with_headers(send), scope["headers"]
        try:
            path = self._policy.judge(scope["method"], scope["raw_path"], scope["query_string"], headers)
            if self._running >= MAX_AT_ONCE:
                raise HTTPException(503, "too many requests at once; wait for their answers")
        except HTTPException as refused:
            await _answer(refused, headers)(scope, receive, protected)
            return
        inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
        self._running += 1
        try:
            await self._application(inner, receive, protected)
        finally:
            self._running -= 1


def _answer(refused: HTTPException, headers: Headers) -> Response:
    """A line of text for people, a document for programs; the connection of somebody without the token is not kept."""
    body, kind = failure(refused.detail), JSON
    if refused.status_code == 303 or any(name == b"accept" and b"text/html" in value for name, value in headers):
        text = "" if refused.status_code == 303 else f"stepscope: {refused.detail}\n"
        body, kind = text.encode(), "text/plain"
    return Response(body, refused.status_code, {**(refused.headers or {}), "connection": "close"}, kind)


def _with_headers(send: Any) -> Any:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            given = message.get("headers", ())
            stored = any(name == b"cache-control" for name, _ in given)
            message = {**message, "headers": [*given, *HEADERS, *(() if stored else (NO_STORE,))]}
        await send(message)

    return sending


ERROR_SCHEMA = "stepscope.error/1"
PREPARING_SCHEMA = "stepscope.preparing/1"


class NotReady(UsageError):
    """Something that cannot be had before the run has been read."""


class StillPreparing(StepscopeError):
    """The tables of a run are being made: not an error to show, but a document of its own."""

    def __init__(self, text: str, share: float | None) -> None:
        super().__init__(text)
        self.share = share

    @property
    def document(self) -> dict[str, Any]:
        """A Preparing of `web/src/lib/types.ts`."""
        return {"schema": PREPARING_SCHEMA, "text": one_line(str(self)), "share": self.share}


# the status of an answer that tells of an error: the first class that fits decides
STATUS = {NotThere: 404, NotReady: 409, UsageError: 400, UnreadableInputError: 422, StepscopeError: 500}


def failure(text: str) -> bytes:
    """A Failure of `web/src/lib/types.ts`, encoded."""
    return encoded({"schema": ERROR_SCHEMA, "error": one_line(text)})


def unexpected(error: BaseException) -> str:
    """A mistake of ours in a line."""
    return f"this could not be made ({type(error).__name__}: {one_line(error, 200)}); please report it"


def encoded(document: Any) -> bytes:
    """JSON in UTF-8. Numbers that are not finite become null; texts that no encoder accepts are escaped."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return json.dumps(document, allow_nan=False, default=str).encode("ascii")
