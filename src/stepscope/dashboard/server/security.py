"""Which requests are answered: those to our own name, with the token, that only read.

`Policy.judge` is a pure function of what a request says, asked before anything else looks at it. A page of another site
that a browser is led to believe lies at our address (DNS rebinding) sends its own name as `Host`; other users of the
machine do not know the token; a path that is not made of plain names is nobody's. Below stand the answers that are no
document of a run: which status an error has, and how documents become bytes.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

import msgspec
from msgspec import Struct

from stepscope.errors import EnvironmentRefusal, StepscopeError, UnreadableInputError, UsageError
from stepscope.report.escape import one_line

METHODS = ("GET", "HEAD")
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


class Refusal(Struct, frozen=True):
    """Why a request is not answered; `text` is one line for the one who sent it."""

    status: int
    text: str
    allow: bool = False  # name the methods that there are


class Elsewhere(Struct, frozen=True):
    """The same place at a better address, relative to the one asked for."""

    location: str
    cookie: str | None = None


class Granted(Struct, frozen=True):
    """The path below the base, beginning with a slash."""

    path: str


Verdict = Refusal | Elsewhere | Granted


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

    def judge(self, method: str, raw_path: bytes, query: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Verdict:
        """Whether a request is answered; `headers` by lower-case name, as ASGI has them."""
        refused = self._refused_host([value for name, value in headers if name == b"host"])
        if refused is not None:
            return refused
        fields = _fields(query)
        if fields is None:
            return Refusal(400, "the address is too long, or its query cannot be read")
        given = [value for name, value in fields if name == TOKEN]
        by_query = any(self._is_token(value) for value in given)
        if not by_query and not any(self._is_token(value) for value in self._carried(headers)):
            return Refusal(403, "no valid token; open the address that `stepscope view` printed")
        if method not in METHODS:
            return Refusal(405, "this server only reads: GET and HEAD", allow=True)
        path = self._below(raw_path)
        if path is None:
            return Refusal(400, "not an address of this server")
        if given:
            rest = [(name, value) for name, value in fields if name != TOKEN]
            return Elsewhere(_same_place(raw_path, rest, path), self._kept() if by_query else None)
        if not path:
            return Elsewhere(_same_place(raw_path, fields, path))
        return Granted(path)

    def _refused_host(self, hosts: Sequence[bytes]) -> Refusal | None:
        match = _HOST.fullmatch(hosts[0].decode("latin-1").lower()) if len(hosts) == 1 else None
        if match is None:
            return Refusal(421, "the request does not say which host it is for")
        name, port = match[1], match[2] or HTTP_PORT
        ours = name in LOOPBACK and port == str(self.port)
        if ours or name in self.hosts or f"{name}:{port}" in self.hosts:
            return None
        return Refusal(421, f"this server does not go by that name; start it with --allow-host {match[0]} if it should")

    def _carried(self, headers: Sequence[tuple[bytes, bytes]]) -> Iterable[str]:
        """Tokens that the headers hold."""
        for name, value in headers:
            text = value.decode("latin-1")
            if name == b"authorization" and text[:7].lower() == "bearer ":
                yield text[7:].strip()
            if name == b"cookie":
                yield from _cookies(text, self.cookie)

    def _is_token(self, value: str) -> bool:
        return secrets.compare_digest(value.encode("utf-8", "surrogateescape"), self.token.encode())

    def _kept(self) -> str:
        return f"{self.cookie}={self.token}; Path={quote(self.base_path, safe=_IN_PATHS)}; HttpOnly; SameSite=Lax"

    def _below(self, raw_path: bytes) -> str | None:
        """The path without the base, "" for the base without its last slash, None for what is no path of ours.

        A proxy may have taken the base off, so a path without it is one of ours too.
        """
        path = unquote(raw_path.decode("latin-1"))
        if not path.startswith("/"):
            return None
        if path == self.base_path[:-1]:
            return ""
        if path.startswith(self.base_path):
            path = path[len(self.base_path) - 1 :]
        if _PATH.fullmatch(path) is None or any(part in _DOTS for part in path.split("/")):
            return None
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


def new_token() -> str:
    return secrets.token_urlsafe(24)


def _fields(query: bytes) -> list[tuple[str, str]] | None:
    if len(query) > MAX_QUERY:
        return None
    try:
        return parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        return None


def _same_place(raw_path: bytes, fields: Sequence[tuple[str, str]], path: str) -> str:
    """A reference from an address to itself with another query; it holds whatever prefix a proxy shows."""
    last = unquote(raw_path.decode("latin-1")).rpartition("/")[2]
    name = quote(last, safe="") + ("" if path else "/")
    return f"./{name}" + (f"?{urlencode(fields)}" if fields else "")


def _cookies(text: str, name: str) -> Iterable[str]:
    """The values of a cookie, which may be there for several paths."""
    for part in text.split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            yield value.strip('"')


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
        verdict = self._policy.judge(scope["method"], scope["raw_path"], scope["query_string"], scope["headers"])
        protected = _with_headers(send)
        if isinstance(verdict, Granted) and self._running >= MAX_AT_ONCE:
            verdict = Refusal(503, "too many requests at once; wait for their answers")
        if isinstance(verdict, Granted):
            inner = {**scope, "path": verdict.path, "raw_path": verdict.path.encode(), "root_path": ""}
            self._running += 1
            try:
                await self._application(inner, receive, protected)
            finally:
                self._running -= 1
        elif isinstance(verdict, Elsewhere):
            extra = [(b"location", verdict.location.encode("ascii"))]
            if verdict.cookie is not None:
                extra.append((b"set-cookie", verdict.cookie.encode("ascii")))
            await _answer(protected, 303, "text/plain; charset=utf-8", b"", extra)
        else:
            await _refuse(protected, scope["headers"], verdict)


async def _refuse(send: Any, headers: Sequence[tuple[bytes, bytes]], refusal: Refusal) -> None:
    extra = [(b"allow", ", ".join(METHODS).encode())] if refusal.allow else []
    if any(name == b"accept" and b"text/html" in value for name, value in headers):
        text = f"stepscope: {refusal.text}\n".encode()
        await _answer(send, refusal.status, "text/plain; charset=utf-8", text, extra)
    else:
        await _answer(send, refusal.status, "application/json", failure(refusal.text), extra)


async def _answer(send: Any, status: int, kind: str, body: bytes, extra: Iterable[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(len(body)).encode())
    # closed after it: a connection of somebody without the token is not kept
    headers = [(b"content-type", kind.encode()), length, (b"connection", b"close"), *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _with_headers(send: Any) -> Any:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", ()))
            more = list(HEADERS)
            if not any(name == b"cache-control" for name, _ in given):
                more.append(NO_STORE)
            message = {**message, "headers": [*given, *more]}
        await send(message)

    return sending


# ---- documents as bytes, and which status an error has ---------------------------------------------------------------

ERROR_SCHEMA = "stepscope.error/1"
PREPARING_SCHEMA = "stepscope.preparing/1"


class NotThere(UsageError):
    """A run, a page or a slice that there is not, or no longer."""


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


# the first class that fits decides
_STATUS: tuple[tuple[type[StepscopeError], int], ...] = (
    (NotThere, 404),
    (NotReady, 409),
    (UsageError, 400),
    (UnreadableInputError, 422),
    (EnvironmentRefusal, 500),
)


def status_of(error: StepscopeError) -> int:
    """The status of an answer that tells of an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


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
