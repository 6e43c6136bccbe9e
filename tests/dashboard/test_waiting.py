"""Who has no token cannot keep the user from the pages: not with open connections, not with bad requests."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.dashboard.server import app
from tests.dashboard.client import Dashboard


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Dashboard]:
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
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_WAITING", 20)
    with contextlib.ExitStack() as stack:
        half = [stack.enter_context(connect(dashboard)) for _ in range(3 * app.MAX_WAITING)]
        assert dashboard.ask("api/runs").status == 200
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


def test_a_connection_without_the_token_is_not_kept(dashboard: Dashboard) -> None:
    with connect(dashboard, b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n") as opened:
        answer = b""
        while more := opened.recv(65536):
            answer += more
    assert answer.startswith(b"HTTP/1.1 421")
