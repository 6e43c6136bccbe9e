"""Binds a port and serves the dashboard: in this thread until it is interrupted, or in one of its own.

running = Running(Settings(paths=(Path("stepscope-runs"),)))
running.begin()
print(running.address)
"""

from __future__ import annotations

import contextlib
import errno
import html
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from stepscope.api import ReadOptions
from stepscope.dashboard import bundle
from stepscope.dashboard.server.handlers import Handlers
from stepscope.dashboard.server.security import LOOPBACK, Policy, parse_base_path, parse_hosts
from stepscope.errors import EnvironmentRefusal

if TYPE_CHECKING:
    import uvicorn


class Opener:
    """Opens one address, once, by a file that only the user reads: command lines, which name it, are read by all."""

    def __init__(self) -> None:
        self._file: Path | None = None

    def open(self, address: str) -> bool:
        """Whether a browser was started. Nothing fails where there is none."""
        import webbrowser

        from stepscope.files import default_folder

        folder = default_folder()  # in the user's home: browsers in a sandbox see no temporary files of others
        target = html.escape(address, quote=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", suffix=".html", prefix="view-", dir=folder, delete=False
            ) as file:
                self._file = Path(file.name)
                file.write(
                    f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}">'
                )
                file.write(f'<title>stepscope</title><p><a href="{target}">stepscope</a></p>\n')
            return webbrowser.open(self._file.as_uri())
        except (OSError, webbrowser.Error):
            return False

    def close(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.unlink()


USUAL_PORT = 6107
USUAL_HOST = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")  # every address of the machine, which is no name in a URL
START_S = 30.0
STOP_S = 1  # for answers under way, at the end


class Settings(Struct, frozen=True):
    """What to show and where.

    Attributes:
        paths: runs, experiments, traces, and folders of them.
        options: how to read traces, and which code in them is the user's.
        host: the address to listen at.
        port: None for `USUAL_PORT`, or a free one where that is taken; 0 for any free one.
        base_path: where the browser sees the server, behind a proxy.
        allow_hosts: further names that requests may be for, each with or without a port.
        token: what a request must carry; a new one by default.
        files: the folder of the built front end.
        source: False quotes no line of source text.
    """

    paths: tuple[Path, ...]
    options: ReadOptions = field(default_factory=lambda: ReadOptions(keep=False))
    host: str = USUAL_HOST
    port: int | None = 0
    base_path: str = "/"
    allow_hosts: tuple[str, ...] = ()
    token: str | None = None
    files: Path | None = field(default_factory=bundle.folder)
    source: bool = True


class Running:
    """A server that is bound; it answers from `begin` on, or in `serve`."""

    def __init__(self, settings: Settings) -> None:
        import uvicorn

        from stepscope.dashboard.server.app import application

        self.token = settings.token or secrets.token_urlsafe(24)
        self.base_path = parse_base_path(settings.base_path)
        hosts = parse_hosts(settings.allow_hosts) | _own_names(settings.host)
        self._handlers = Handlers(settings.paths, settings.options, source=settings.source)
        self._socket = _bound(settings.host, settings.port)
        self.port = int(self._socket.getsockname()[1])
        policy = Policy(self.token, self.port, hosts, self.base_path)
        self._host = settings.host
        self._server = uvicorn.Server(_configuration(application(self._handlers, policy, settings.files)))
        self._thread = threading.Thread(target=self.serve, name="stepscope-view", daemon=True)

    @property
    def url(self) -> str:
        """The address without the token, ending in a slash."""
        host = socket.gethostname() if self._host in EVERYWHERE else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}{self.base_path}"

    @property
    def address(self) -> str:
        """What opens it in a browser."""
        return f"{self.url}?token={self.token}"

    def serve(self) -> None:
        """Answer until interrupted; raises `KeyboardInterrupt` then."""
        try:
            with warnings.catch_warnings():  # of what has not begun when Ctrl-C comes
                warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
                self._server.run(sockets=[self._socket])
        finally:
            self._end()

    def begin(self) -> None:
        """Answer on a thread of its own, from now on."""
        self._thread.start()
        end = time.monotonic() + START_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.01)
        if not self._server.started:
            raise EnvironmentRefusal("the server did not start; try again")

    def close(self) -> None:
        """Stop answering."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(START_S)
        self._end()

    def _end(self) -> None:
        self._handlers.close()
        with contextlib.suppress(OSError):
            self._socket.close()


def serve(settings: Settings, ready: Callable[[Running], None]) -> None:
    """Serve in this thread until Ctrl-C, which raises `KeyboardInterrupt`; `ready` is told when the port is bound."""
    running = Running(settings)
    ready(running)
    running.serve()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host in LOOPBACK or host.startswith("127.") or host == "::1"


def _own_names(host: str) -> frozenset[str]:
    """Names that requests may be for where we listen beyond this machine."""
    if is_loopback(host):
        return frozenset()
    if host not in EVERYWHERE:
        return frozenset({f"[{host}]" if ":" in host else host.lower()})
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


def _bound(host: str, port: int | None) -> socket.socket:
    """A socket that listens; without a port the usual one, or a free one where that is taken."""
    if port is None:
        with contextlib.suppress(EnvironmentRefusal):
            return _bound(host, USUAL_PORT)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port or 0))
        opened.listen(128)
    except (OSError, OverflowError) as error:
        opened.close()
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        what = "is taken" if taken else f"cannot be had ({getattr(error, 'strerror', None) or error})"
        raise EnvironmentRefusal(f"port {port} of {host} {what}; name another with --port, 0 for any") from None
    os.set_inheritable(opened.fileno(), False)
    return opened


def _configuration(application: Any) -> uvicorn.Config:
    import uvicorn

    from stepscope.dashboard.server.app import protocol

    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # errors get a line of ours
    configuration = uvicorn.Config(
        application,
        loop="asyncio",
        http=protocol(),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=STOP_S,
    )
    configuration.get_loop_factory()  # what it imports would be a long moment in which Ctrl-C finds no server
    return configuration
