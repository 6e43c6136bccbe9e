"""What a run does now, for who asks: an address on this machine that Prometheus, a collector or W&B reads.

The page is made once a second, by the process beside the run, from what is on disk by then; a request only sends it.
Loss histories and single steps are not in it: it says how the run is at this moment.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import socket
import threading
from array import array
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import parse_qs, urlsplit

from stepscope.errors import refuse
from stepscope.record.host.hardware import Metric
from stepscope.record.host.jsonlines import JsonLinesTail
from stepscope.schema import STEP_COLUMNS

ADDRESS = "127.0.0.1"
PATH = "/metrics"
TOKEN_VARIABLE = "STEPSCOPE_METRICS_TOKEN"
LEAST_TOKEN = 8  # characters
CLIENTS_LIMIT = 8  # at once; others are hung up on
PATIENCE_S = 5.0  # with one that does not say what it wants
SERIES_LIMIT = 200  # of each rank: a script may put the step into the names that it logs under
LATEST = 50  # steps whose median is a step's time now
CHUNKS_LIMIT = 8  # of a journal, 1 MiB each, in one second

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
GAUGE, COUNTER = "gauge", "counter"
# Of the readings, those that only ever grow; of a process, those that are told at all.
GROWING = {
    *("cgroup_throttled_ns", "cgroup_oom_events", "read_bytes", "write_bytes", "major_faults"),
    *("gpu_energy_mj", "cpu_energy_uj"),
}
ABOUT_COUNTERS = {"energy_after_ns", "cpu_energy_range_uj"}  # of use to who lays readings beside each other alone
OF_RANKS = {"cpu_pct", "rss_bytes", "read_bytes", "write_bytes", "major_faults"}
_PHASES = ("data_wait", "forward", "backward", "optimizer", "other")
_LARGEST = 1 << 63  # a number that is none of ours: it would not even be a float
_WORDS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
_COLUMN = {name: place for place, name in enumerate(STEP_COLUMNS)}
_FOLDER = re.compile(r"rank-([0-9A-Za-z._-]{1,40})")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]+")


@dataclass(frozen=True)
class Endpoint:
    """A socket that listens, and the word that whoever asks has to say."""

    socket: socket.socket
    token: str

    @property
    def address(self) -> str:
        """Without the token."""
        return f"http://{ADDRESS}:{self.socket.getsockname()[1]}{PATH}"


def listen(port: int, environ: Mapping[str, str]) -> Endpoint:
    """Listen on a port of this machine alone, 0 for a free one.

    Raises `UsageError` for what is no port or no token, `OSError` where the port is taken.
    """
    token = environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(16)
    wanted = f"{TOKEN_VARIABLE} must have at least {LEAST_TOKEN} characters, letters, digits, - and _ alone"
    refuse(
        {
            f"--metrics-port must lie between 0 and 65535, not {port}": not 0 <= port <= 65535,
            wanted: re.fullmatch(rf"[A-Za-z0-9_-]{{{LEAST_TOKEN},200}}", token) is None,
        }
    )
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((ADDRESS, port))
        found.listen(CLIENTS_LIMIT)
    except OSError:
        found.close()
        raise
    return Endpoint(found, token)


@dataclass
class _Kind:
    """The steps of one kind of one rank so far; those in windows of a profiler count for no timing."""

    steps: int = 0
    samples: int = 0
    timed: int = 0
    phases_ns: dict[str, int] = field(default_factory=dict)
    latest_ns: deque[int] = field(default_factory=lambda: deque(maxlen=LATEST))
    ended_ns: int = 0


class _Rank:
    def __init__(self, folder: Path, rank: str) -> None:
        self.rank = rank
        self.kinds: dict[str, _Kind] = {}
        self.values: dict[tuple[str, str, str], float] = {}  # the last one by name, source and line
        self.left_out: set[str] = set()
        self._steps = JsonLinesTail(folder / "steps.jsonl", list)
        self._events = JsonLinesTail(folder / "events.jsonl")

    def read(self) -> None:
        for row in _appended(self._steps):
            if len(row) > _COLUMN["in_window"]:
                self._add_step(row)
        for event in _appended(self._events):
            if event.get("kind") == "metrics":
                with contextlib.suppress(TypeError, AttributeError, LookupError, ValueError):  # no series of ours
                    for series in event["series"]:
                        self._add_value(series)

    def _add_step(self, row: list[Any]) -> None:
        def number(name: str) -> int:
            value = row[_COLUMN[name]]
            return value if isinstance(value, int) and 0 <= value < _LARGEST else 0

        kind = self.kinds.setdefault("eval" if row[_COLUMN["kind"]] == "eval" else "train", _Kind())
        wall_ns = number("wall_ns")
        kind.steps += 1
        kind.samples += number("samples")
        kind.ended_ns = number("start_ns") + wall_ns
        if number("in_window"):
            return
        kind.timed += 1
        kind.latest_ns.append(wall_ns)
        for phase in _PHASES:
            # without a loader nothing is known to wait for data, as in the reports
            called = "before_forward" if phase == "data_wait" and not number("fetches") else phase
            kind.phases_ns[called] = kind.phases_ns.get(called, 0) + number(f"{phase}_ns")

    def _add_value(self, series: Mapping[str, Any]) -> None:
        name, source, line = str(series.get("name")), str(series.get("source")), ""
        values: Any = series.get("values") or [None]
        if source == "backward":  # the loss of an update takes more than its last pass
            name, line = "backward_loss", f"{os.path.basename(str(series.get('file')))}:{series.get('line')}"
        if isinstance(values, str):  # as the agent packs columns of numbers
            values = array("d", b64decode(values))
        value: Any = _WORDS.get(values[-1], values[-1])
        if not isinstance(value, float) and not (isinstance(value, int) and abs(value) < _LARGEST):
            return
        key = (name, source, line)
        if key in self.values or len(self.values) < SERIES_LIMIT:
            self.values[key] = float(value)
        else:
            self.left_out.add(name[:100])


def _appended(tail: JsonLinesTail) -> Iterator[Any]:
    for _ in range(CHUNKS_LIMIT):
        rows = tail.read()
        if not rows:
            return
        yield from rows


class Page:
    """The page of a run, made anew by `look`; `sent` is what is sent of it, in each of two formats."""

    def __init__(self, run: Path, host_dir: Path) -> None:
        self._run = run
        self._about = {"run": run.name, "host": os.uname().nodename}
        self._claims = JsonLinesTail(host_dir / "agents.jsonl")
        self._ranks: dict[str, _Rank] = {}
        self._pids: dict[int, str] = {}
        self.sent = {OPENMETRICS: b"# EOF\n", PLAIN: b""}

    def look(self, readings: Iterable[Metric]) -> None:
        """Read what was written since, and make the page of it and of the last readings of the machine."""
        for claim in self._claims.read():
            found = _FOLDER.fullmatch(str(claim.get("folder")))
            if found is not None and found[0] not in self._ranks:
                self._ranks[found[0]] = _Rank(self._run / found[0], found[1])
                self._pids[claim.get("pid", 0)] = found[1]
        samples = list(self._samples(readings))
        families: dict[tuple[str, str], list[str]] = {}
        for name, kind, labels, value in samples:
            text = ",".join(f'{label}="{_escaped(said)}"' for label, said in {**self._about, **labels}.items())
            total = "_total" if kind == COUNTER else ""
            families.setdefault((name, kind), []).append(f"{name}{total}{{{text}}} {_number(value)}\n")
        opened, plain = [], []
        for (name, kind), lines in families.items():
            opened += [f"# TYPE {name} {kind}\n", *lines]
            plain += [f"# TYPE {name}{'_total' if kind == COUNTER else ''} {kind}\n", *lines]
        self.sent = {OPENMETRICS: "".join([*opened, "# EOF\n"]).encode(), PLAIN: "".join(plain).encode()}

    def _samples(self, readings: Iterable[Metric]) -> Iterator[tuple[str, str, dict[str, str], float]]:
        """(name, kind, labels, value), those of a name together or not."""
        for rank in self._ranks.values():
            rank.read()
            for which, kind in rank.kinds.items():
                labels = {"rank": rank.rank, "kind": which}
                yield "stepscope_steps", COUNTER, labels, kind.steps
                yield "stepscope_samples", COUNTER, labels, kind.samples
                yield "stepscope_last_step_timestamp_seconds", GAUGE, labels, kind.ended_ns / 1e9
                yield "stepscope_timed_steps", COUNTER, labels, kind.timed
                for phase, spent_ns in kind.phases_ns.items():
                    yield "stepscope_timed_step_seconds", COUNTER, {**labels, "phase": phase}, spent_ns / 1e9
                if kind.latest_ns:
                    yield "stepscope_step_ms", GAUGE, labels, median(kind.latest_ns) / 1e6
            for (name, source, line), value in rank.values.items():
                labels = {"rank": rank.rank, "name": name, "source": source, **({"line": line} if line else {})}
                yield f"stepscope_{_NOT_IN_NAMES.sub('_', name)[:100]}_value", GAUGE, labels, value
            if rank.left_out:
                yield "stepscope_names_left_out", GAUGE, {"rank": rank.rank}, len(rank.left_out)
        for name, _, value, pid, device in readings:
            labels = {"device": device} if device is not None else {}
            if name in ABOUT_COUNTERS:
                continue
            if pid is not None:
                if pid not in self._pids or name not in OF_RANKS:
                    continue
                labels = {"rank": self._pids[pid]}
            of = "rank" if pid is not None else "host"
            yield f"stepscope_{of}_{name}", COUNTER if name in GROWING else GAUGE, labels, value


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").encode("utf-8", "replace").decode()


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    return repr(value) if abs(value) != float("inf") else "+Inf" if value > 0 else "-Inf"


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE_S
    server: Server

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        said = parse_qs(address.query).get("token", [""])[0]
        given = self.headers.get("Authorization", "")
        said = said or (given[7:].strip() if given[:7].lower() == "bearer " else "")
        if not hmac.compare_digest(said.encode("utf-8", "replace"), self.server.token.encode()):
            return self._answer(403, PLAIN, b"no valid token: give ?token= or Authorization: Bearer\n")
        if address.path != PATH:
            return self._answer(404, PLAIN, f"nothing here but {PATH}\n".encode())
        kind = OPENMETRICS if "application/openmetrics-text" in self.headers.get("Accept", "") else PLAIN
        return self._answer(200, kind, self.server.page.sent[kind])

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


class Server(HTTPServer):
    """Sends `page` to who says the token, each on a thread of its own."""

    def __init__(self, descriptor: int, token: str, page: Page) -> None:
        super().__init__((ADDRESS, 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = socket.socket(fileno=descriptor)
        self.token, self.page = token, page
        self._places = threading.BoundedSemaphore(CLIENTS_LIMIT)
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer beside other requests, or hang up where there are too many."""
        if not self._places.acquire(blocking=False):
            return self.shutdown_request(request)
        threading.Thread(target=self._answer, args=(request, client_address), daemon=True).start()
        return None

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:
            pass  # it has hung up, or says nothing
        finally:
            self.shutdown_request(request)
            self._places.release()


def start(descriptor: int, token: str, host_dir: Path) -> Callable[[Iterable[Metric]], None]:
    """Serve; call what it returns with each reading of the machine."""
    page = Page(host_dir.parent, host_dir)
    Server(descriptor, token, page)
    return page.look
