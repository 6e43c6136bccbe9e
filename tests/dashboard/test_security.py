"""Who is answered: only who has the token, names this server, asks for a plain path, and wants to read.

Who has no token cannot keep the user from the pages: not with open connections, not with bad requests.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from stepscope.dashboard.server import app
from stepscope.dashboard.server.security import Policy, parse_base_path, parse_hosts
from stepscope.errors import UsageError
from tests.dashboard.client import Dashboard

TOKEN = "right-token_0123456789"
POLICY = Policy(TOKEN, 6107)
BEARER = (b"authorization", f"Bearer {TOKEN}".encode())


def judged(
    path: bytes = b"/",
    *,
    policy: Policy = POLICY,
    method: str = "GET",
    query: bytes = b"",
    host: bytes | None = b"127.0.0.1:6107",
    headers: tuple[tuple[bytes, bytes], ...] = (BEARER,),
) -> str | HTTPException:
    """The path that is answered, or the refusal."""
    given = headers if host is None else ((b"host", host), *headers)
    try:
        return policy.judge(method, path, query, given)
    except HTTPException as refused:
        return refused


def status(verdict: str | HTTPException) -> int:
    return 200 if isinstance(verdict, str) else verdict.status_code


def elsewhere(verdict: str | HTTPException) -> dict[str, str]:
    """The address and the cookie of a redirect."""
    assert status(verdict) == 303
    return dict(verdict.headers)


FOREIGN = rb"""evil.example evil.example:6107 127.0.0.1.evil.example:6107 localhost:6108 localhost localhost:
localhost:6107@evil.example evil.example#localhost:6107 [::1]"""


@pytest.mark.parametrize("host", [*FOREIGN.split(), b"", b"127.0.0.1:6107, evil.example", b"\xff", None])
def test_a_foreign_host_is_refused_even_with_the_token(host: bytes | None) -> None:
    assert status(judged(host=host)) == 421


def test_allowed_hosts() -> None:
    assert status(judged(headers=(BEARER, (b"host", b"localhost:6107")))) == 421  # two are none
    policy = Policy(TOKEN, 6107, parse_hosts(["Hub.example.org, localhost:8888", "[fd00::1]:99"]))
    for host in (b"hub.example.org", b"hub.example.org:443", b"localhost:8888", b"localhost:6107", b"[FD00::1]:99"):
        assert judged(policy=policy, host=host) == "/", host
    for host in (b"localhost:8889", b"example.org", b"x.hub.example.org", b"[fd00::1]:98"):
        assert status(judged(policy=policy, host=host)) == 421, host


@pytest.mark.parametrize("text", ["https://hub", "hub/path", "a b", "", "hub:port", "*", "\x1b[0m"])
def test_names_that_are_none_are_refused_at_the_start(text: str) -> None:
    with pytest.raises(UsageError, match="--allow-host"):
        parse_hosts([text])


@pytest.mark.parametrize(
    "header",
    [
        *((b"authorization", b"Bearer " + value) for value in (b"wrong", b"", b"\xff")),
        (b"authorization", b"Basic " + TOKEN.encode()),
        *((b"cookie", b"stepscope-6107=" + value) for value in (b"wrong", b"\xff\xfe")),
        (b"cookie", f"stepscope-6108={TOKEN}".encode()),
        (b"accept", b"*/*"),
    ],
)
def test_without_the_token_nothing_is_answered(header: tuple[bytes, bytes]) -> None:
    for path in (b"/", b"/api/runs", b"/healthz", b"/../x"):
        assert status(judged(path, headers=(header,))) == 403
    for query in (b"token=wrong", b"token="):
        assert status(judged(query=query, headers=(header,))) == 403


def test_a_bearer_or_a_cookie_is_enough() -> None:
    assert judged(headers=((b"authorization", f"bearer  {TOKEN}".encode()),)) == "/"
    kept = f"a=b; stepscope-6107=stale; stepscope-6107={TOKEN}".encode()
    assert judged(headers=((b"cookie", kept),)) == "/"


def test_a_token_in_the_address_moves_into_a_cookie() -> None:
    verdict = judged(b"/", query=f"token={TOKEN}".encode(), headers=())
    kept = f"stepscope-6107={TOKEN}; Path=/; HttpOnly; SameSite=Lax"
    assert elsewhere(verdict) == {"location": "./", "set-cookie": kept}
    further = judged(b"/api/runs", query=f"q=a%20b&token={TOKEN}&x=%2F".encode(), headers=())
    assert elsewhere(further)["location"] == "./runs?q=a+b&x=%2F"


def test_an_old_token_in_the_address_does_not_lock_out_who_has_the_cookie() -> None:
    cookie = (b"cookie", f"stepscope-6107={TOKEN}".encode())
    assert elsewhere(judged(query=b"token=old", headers=(cookie,))) == {"location": "./"}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get", "PROPFIND"])
def test_other_methods_are_refused(method: str) -> None:
    verdict = judged(method=method)
    assert isinstance(verdict, HTTPException)
    assert (verdict.status_code, verdict.headers) == (405, {"allow": "GET, HEAD"})
    assert judged(method="HEAD") == "/"


PATHS = rb"""/../etc/passwd /assets/../../x /assets/.. /%2e%2e/etc/passwd /%2E./x /..%2fetc/passwd /%252e%252e/x /..%5cx
/..\x /./x //etc/passwd /api//runs /%2fetc/passwd /etc%00/passwd /a%0d%0ab http://evil.example/ etc/passwd *"""


@pytest.mark.parametrize("path", [*PATHS.split(), b"/\xc3\xa9", b""])
def test_paths_that_are_not_plain_are_refused(path: bytes) -> None:
    assert status(judged(path)) == 400


@given(st.binary(max_size=60))
def test_no_path_gets_out_of_ours(raw: bytes) -> None:
    verdict = judged(b"/" + raw)
    if isinstance(verdict, str):
        parts = verdict.split("/")[1:]
        assert ".." not in parts
        assert "" not in parts[:-1]
        assert verdict.isascii()
        assert not set(verdict) & set("%\\\0:?#<>\"'")
    else:
        assert status(verdict) in (303, 400)


@given(st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=80))
def test_whatever_is_sent_is_judged_without_an_error(query: bytes, value: bytes, host: bytes) -> None:
    headers = ((b"cookie", value), (b"authorization", b"Bearer " + value), BEARER)
    assert status(judged(query=query, host=host, headers=headers)) in (200, 303, 400, 403, 421)
    assert status(judged(query=query, headers=headers)) in (200, 303, 400, 403)


@given(st.text(max_size=40))
def test_a_redirect_stays_here(text: str) -> None:
    from urllib.parse import quote, urljoin

    verdict = judged(f"/{quote(text, safe='/')}".encode(), query=f"token={TOKEN}&next=//evil.example".encode())
    if status(verdict) == 303:
        location = elsewhere(verdict)["location"]
        assert urlsplit(urljoin("http://here:1/", location)).netloc == "here:1"
        assert location.isascii()
        assert not {"\r", "\n"} & set(location)


def test_a_base_path_is_taken_off_and_may_have_been_taken_off_by_the_proxy() -> None:
    policy = Policy(TOKEN, 6107, base_path=parse_base_path("user/a@b/proxy/6107"))
    assert judged(b"/user/a@b/proxy/6107/api/runs", policy=policy) == "/api/runs"
    assert judged(b"/user/a%40b/proxy/6107/", policy=policy) == "/"
    assert judged(b"/api/runs", policy=policy) == "/api/runs"
    assert judged(b"/user/a@b/proxy/6107", policy=policy).headers == {"location": "./6107/"}
    assert status(judged(b"/user/a@b/proxy/6107/../x", policy=policy)) == 400
    verdict = judged(b"/user/a@b/proxy/6107/", policy=policy, query=f"token={TOKEN}".encode())
    assert "; Path=/user/a@b/proxy/6107/;" in elsewhere(verdict)["set-cookie"]


@pytest.mark.parametrize("text", ["/a/../b", "a?b", "http://x/y", "a b", "a\nb", "a#b", "a\\b"])
def test_base_paths_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--base-path"):
        parse_base_path(text)


def test_every_answer_carries_the_headers(dashboard: Dashboard) -> None:
    answers = [dashboard.ask("api/runs"), dashboard.ask("api/runs", token=False), dashboard.ask("api/nothing")]
    answers += [dashboard.ask("api/runs", method="POST"), dashboard.ask("/")]
    assert [answer.status for answer in answers[:4]] == [200, 403, 404, 405]
    for headers in (answer.headers for answer in answers):
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert headers["cache-control"] in ("no-store", "no-cache")
        assert not {"server", "access-control-allow-origin"} & set(headers)
    assert answers[3].headers["allow"] == "GET, HEAD"


def test_refusals_are_one_line_of_json_and_for_people_one_of_text(dashboard: Dashboard) -> None:
    refused = dashboard.ask("api/runs", token=False)
    assert refused.json["schema"] == "stepscope.error/1"
    assert "\n" not in refused.json["error"]
    read = dashboard.ask("/", token=False, headers={"Accept": "text/html,*/*"})
    assert read.status == 403
    assert read.headers["content-type"].startswith("text/plain")
    assert read.body.count(b"\n") == 1


def test_the_printed_address_gives_a_cookie_that_opens_everything(dashboard: Dashboard) -> None:
    target = dashboard.address.removeprefix(dashboard.url)
    first = dashboard.ask(target, token=False)
    assert first.status == 303
    assert dashboard.token not in first.headers["location"]
    cookie, _, attributes = first.headers["set-cookie"].partition(";")
    assert {"HttpOnly", "SameSite=Lax"} <= {part.strip() for part in attributes.split(";")}
    assert dashboard.ask("api/runs", token=False, headers={"Cookie": cookie}).status == 200


def test_a_raw_request_with_another_address_as_its_target_is_refused(dashboard: Dashboard) -> None:
    with socket.create_connection(("127.0.0.1", dashboard.running.port), timeout=30) as connection:
        lines = ["GET http://evil.example/ HTTP/1.1", f"Host: 127.0.0.1:{dashboard.running.port}"]
        lines += [f"Authorization: Bearer {dashboard.token}", "Connection: close", "", ""]
        connection.sendall("\r\n".join(lines).encode())
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400")


def test_a_dashboard_behind_a_proxy(dashboard_of: Callable[..., Dashboard], small_run: Path) -> None:
    shown = dashboard_of(small_run, base_path="/user/ann/proxy/6107", allow_hosts=("hub.example.org",))
    assert shown.url.endswith("/user/ann/proxy/6107/")
    hub = {"Host": "hub.example.org"}
    assert shown.ask("api/runs", headers=hub).status == 200
    assert shown.ask("/api/runs", headers=hub).status == 200
    assert shown.ask("api/runs", headers={"Host": "evil.example"}).status == 421
    assert shown.ask("/user/ann/proxy/6107", headers=hub).headers["location"] == "./6107/"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Dashboard]:
    with Dashboard.start(tmp_path) as shown:
        yield shown


def connect(dashboard: Dashboard, text: bytes = b"GET / HTTP/1.1\r\nHost: x") -> socket.socket:
    opened = socket.create_connection(("127.0.0.1", dashboard.running.port), timeout=20)
    opened.sendall(text)
    return opened


def is_closed(opened: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return not opened.recv(1)
    return True


def test_any_number_of_half_open_connections_keeps_nobody_out(
    alone: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_WAITING", 20)
    with contextlib.ExitStack() as stack:
        half = [stack.enter_context(connect(alone)) for _ in range(3 * app.MAX_WAITING)]
        assert alone.ask("api/runs").status == 200
        assert all(is_closed(opened) for opened in half[: app.MAX_WAITING])


@pytest.mark.parametrize("kept_alive", [False, True])
def test_a_request_that_is_not_sent_in_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_alive: bool
) -> None:
    monkeypatch.setattr(app, "REQUEST_S", 0.3)
    with Dashboard.start(tmp_path) as shown:
        fields = f"Host: 127.0.0.1:{shown.running.port}\r\nAuthorization: Bearer {shown.running.token}\r\n"
        whole = f"GET /api/runs HTTP/1.1\r\n{fields}\r\n"
        with connect(shown, whole.encode() if kept_alive else b"") as opened:
            if kept_alive:
                answer = http.client.HTTPResponse(opened)
                answer.begin()
                assert (answer.status, answer.read()[:1]) == (200, b"{")  # all of it, in however many pieces it comes
                time.sleep(0.5)  # a connection that is done is kept
            opened.sendall(b"GET /")
            began = time.monotonic()
            assert is_closed(opened)
            assert time.monotonic() - began < 3  # and not when the server ends idle ones


def test_a_connection_without_the_token_is_not_kept(alone: Dashboard) -> None:
    with connect(alone, b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n") as opened:
        answer = b""
        while more := opened.recv(65536):
            answer += more
    assert answer.startswith(b"HTTP/1.1 421")
