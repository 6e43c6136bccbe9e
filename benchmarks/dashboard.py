"""How quickly the dashboard answers about a very large trace: `python benchmarks/dashboard.py [--events N] [--quick]`.

A trace of that many events is made of a real one (generate_trace.py) and shown by `stepscope view`, twice: first its
tables are made, then they are there. Measured over HTTP, each answer to its last byte: the time until pages can be had,
every page, windows of the timeline from the whole trace down to a hundred microseconds, a search, a slice. A Chromium
then goes through all pages and zooms into the timeline; what its page's process holds alone (USS) and its JavaScript
heap are noted after each. Aims: pages within 1 s, the browser within 300 MB. Keep the machine idle. The result goes
between markers of benchmarks/RESULTS.md, except with --quick.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import psutil
from generate_trace import generate
from results import RESULTS, machine, put_between_markers

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
BASE = TRACES / "tracelens/h100/facebook_timesformer-base-finetuned-k400__1016002.json.gz"
PAGES = (
    *("findings", "steps", "timeline", "flame", "operators", "kernels", "modules", "memory", "compiles", "gpu"),
    *("system", "compare", "environment"),
)
WINDOWS_NS = {"the whole trace": None, "1 s": 10**9, "10 ms": 10**7, "100 µs": 10**5}
WIDTH = "2400"
PAGE_S, BROWSER_MB = 1.0, 300.0
PREPARING_S = 1800
LAUNCHES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_ADDRESS = re.compile(r"https?://\S+")


@dataclass
class Measured:
    """Seconds by what was asked for, one entry a round; megabytes by page; figures by name."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    kilobytes: dict[str, float] = field(default_factory=dict)
    browser_mb: dict[str, tuple[float, float]] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, seconds: float, size: int) -> None:
        self.seconds.setdefault(what, []).append(seconds)
        self.kilobytes[what] = size / 1000


# ------------------------------------------------------------------------------------------------------ the server


class Served:
    """A dashboard in a process of its own, and questions to it."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address
        parts = urlsplit(address)
        self._token = parse_qs(parts.query)["token"][0]
        self._root = f"{parts.scheme}://{parts.netloc}{parts.path}"

    def ask(self, path: str, **params: str) -> tuple[int, bytes, float]:
        """Status, body and seconds to the last byte."""
        query = f"?{urlencode(params)}" if params else ""
        request = urllib.request.Request(f"{self._root}api/{path}{query}")
        request.add_header("Authorization", f"Bearer {self._token}")
        start = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return answer.status, answer.read(), time.perf_counter() - start
        except urllib.error.HTTPError as error:
            return error.code, error.read(), time.perf_counter() - start

    def document(self, path: str, **params: str) -> Any:
        """The document, asked for until it is there."""
        end = time.monotonic() + PREPARING_S
        while time.monotonic() < end:
            status, body, _ = self.ask(path, **params)
            if status == 200:
                return json.loads(body)
            if status != 202:
                raise SystemExit(f"{path}: {status} {body[:200]!r}")
            time.sleep(0.2)
        raise SystemExit(f"{path}: not ready after {PREPARING_S} s")

    def memory_mb(self) -> tuple[float, float]:
        """What the server holds now, and at most did."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.MULTILINE))
        return int(found["VmRSS"]) / 1000, int(found["VmHWM"]) / 1000


@contextlib.contextmanager
def served(trace: Path, cache: Path) -> Iterator[Served]:
    """`stepscope view` of the trace, with tables kept below `cache`."""
    words = [sys.executable, "-m", "stepscope", "view", str(trace), "--no-browser", "--port", "0"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        address = next((match[0] for line in process.stdout if (match := _ADDRESS.search(line))), None)
        if address is None:
            raise SystemExit("the server said no address")
        yield Served(process, address)
    finally:
        process.terminate()
        process.wait(timeout=60)


def prepared(server: Served) -> tuple[str, float]:
    """The run's id, and the seconds until its pages can be had."""
    run = server.document("runs")["runs"][0]["id"]
    start = time.perf_counter()
    end = time.monotonic() + PREPARING_S
    while time.monotonic() < end:
        head = server.document(f"runs/{run}")
        if head["error"]:
            raise SystemExit(f"the run could not be prepared: {head['error']}")
        if head["preparing"] is None:
            return run, time.perf_counter() - start
        time.sleep(0.1)
    raise SystemExit(f"not ready after {PREPARING_S} s")


def ask_everything(server: Served, run: str, measured: Measured, rounds: int) -> None:
    """Every page and every question about the timeline, `rounds` times."""
    for page in PAGES:
        _measure(server, measured, f"page {page}", f"runs/{run}/pages/{page}")
    block = _block(server.document(f"runs/{run}/pages/timeline"), "timeline")
    first, last = block["window"]["from_ns"], block["window"]["to_ns"]
    operators = _block(server.document(f"runs/{run}/pages/operators"), "table")["rows"]
    for row in operators[:rounds]:  # another one each time: answers are kept
        _measure(server, measured, "page operators, one opened", f"runs/{run}/pages/operators", operator=row["name"])
    hits = server.document(f"runs/{run}/timeline/search", text="gemm")["hits"]
    hit = hits[len(hits) // 2] if hits else None
    for _ in range(rounds):
        for page in PAGES:
            _measure(server, measured, f"page {page}", f"runs/{run}/pages/{page}")
        for name, length in WINDOWS_NS.items():
            begin = max((hit["start_ns"] if hit else (first + last) // 2) - (length or 0) // 2, 0)
            bounds = (first, last) if length is None else (begin, begin + length)
            params = {"from": str(bounds[0]), "to": str(bounds[1]), "width": WIDTH}
            _measure(server, measured, f"window of {name}", f"runs/{run}/timeline", **params)
        _measure(server, measured, "search", f"runs/{run}/timeline/search", text="gemm")
        if hit is not None:
            _measure(server, measured, "slice", f"runs/{run}/slices/{hit['id']}")


def _measure(server: Served, measured: Measured, what: str, path: str, **params: str) -> None:
    status, body, seconds = server.ask(path, **params)
    if status != 200:
        measured.figures[what] = f"status {status}"
        return
    measured.add(what, seconds, len(body))
    print(f"{what}: {seconds:.3f} s, {len(body) / 1000:.0f} kB")


def _block(page: Any, kind: str) -> Any:
    return next(block for block in page["blocks"] if block["kind"] == kind)


# ----------------------------------------------------------------------------------------------------- the browser


def browse(server: Served, run: str, measured: Measured) -> None:
    """Through all pages in one tab, then into the timeline."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        measured.figures["browser"] = "needs Playwright"
        return
    program = next(filter(None, map(shutil.which, LAUNCHES)), None)
    if program is None:
        measured.figures["browser"] = "not found"
        return
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        devtools = tab.context.new_cdp_session(tab)
        devtools.send("Performance.enable")
        tab.goto(server.address)
        for number, page in enumerate((*PAGES, "timeline")):
            tab.evaluate("hash => { location.hash = hash; }", f"#/run/{run}/{page}")
            settle(tab)
            _note(measured, devtools, page if number < len(PAGES) else f"{page}, again")
        box = tab.locator("canvas").first.bounding_box()
        if box is not None:
            tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            for _ in range(12):
                tab.keyboard.press("w")
                tab.mouse.wheel(0, -400)
                settle(tab)
            _note(measured, devtools, "timeline, zoomed in")
        browser.close()


def settle(tab: Any) -> None:
    """Until nothing is asked for any more."""
    tab.wait_for_timeout(300)
    tab.wait_for_load_state("networkidle")


def _note(measured: Measured, devtools: Any, where: str) -> None:
    values = {entry["name"]: entry["value"] for entry in devtools.send("Performance.getMetrics")["metrics"]}
    heap = values["JSHeapUsedSize"] / 1e6
    renderers = [
        process.memory_full_info().uss
        for process in psutil.Process().children(recursive=True)
        if "--type=renderer" in process.cmdline()
    ]
    measured.browser_mb[where] = (max(renderers, default=0) / 1e6, heap)
    print(f"browser at {where}: {measured.browser_mb[where][0]:.0f} MB, heap {heap:.0f} MB")


# -------------------------------------------------------------------------------------------------------- the text


def text(measured: Measured, about: dict[str, str]) -> str:
    """The section of RESULTS.md."""
    lines = [", ".join(f"{key}: {value}" for key, value in about.items()) + ".", ""]
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in measured.figures.items()), ""]
    lines += ["| asked for | first time | slowest later | size |", "| --- | --- | --- | --- |"]
    for what, seconds in measured.seconds.items():
        later = f"{max(seconds[1:]):.3f} s" if len(seconds) > 1 else ""
        lines.append(f"| {what} | {seconds[0]:.3f} s | {later} | {measured.kilobytes[what]:.0f} kB |")
    slowest = max(max(seconds) for seconds in measured.seconds.values())
    lines += ["", f"- The slowest answer took {slowest:.2f} s; aim {PAGE_S:.0f} s: {_word(slowest <= PAGE_S)}."]
    if measured.browser_mb:
        lines += ["", "| after the page | its process alone | JavaScript heap |", "| --- | --- | --- |"]
        lines += [f"| {where} | {uss:.0f} MB | {heap:.0f} MB |" for where, (uss, heap) in measured.browser_mb.items()]
        most = max(uss for uss, _ in measured.browser_mb.values())
        lines += [
            "",
            f"- The browser held {most:.0f} MB at most; aim {BROWSER_MB:.0f} MB: {_word(most <= BROWSER_MB)}.",
        ]
    return "\n".join(lines)


def _word(holds: bool) -> str:
    return "holds" if holds else "missed"


def bytes_per_event(base: Path) -> float:
    """Of the unpacked trace, about."""
    content = gzip.decompress(base.read_bytes()) if base.suffix == ".gz" else base.read_bytes()
    return len(content) / max(content.count(b'"ph"'), 1)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="how quickly the dashboard answers about a large trace")
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--base", type=Path, default=BASE, help="the real trace that is repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the trace and its tables; kept")
    parser.add_argument("--no-browser", action="store_true")
    parser.add_argument("--quick", action="store_true", help="write no results")
    args = parser.parse_args()
    measured = Measured()
    about = machine("stepscope", "polars", "numpy")
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stepscope-dashboard-")))
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"trace-{args.events}.pt.trace.json.gz"
        if not trace.exists():
            generate(args.base, trace, args.events * bytes_per_event(args.base) / 1e6)
        measured.figures["trace"] = f"{args.base.name} repeated, {trace.stat().st_size / 1e6:.0f} MB packed"
        cache = folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        for name in ("until pages can be had, tables to be made", "until pages can be had, tables there"):
            with served(trace, cache) as server:
                run, seconds = prepared(server)
                measured.figures[name] = f"{seconds:.1f} s"
                print(f"{name}: {seconds:.1f} s")
                if name.endswith("there"):
                    ask_everything(server, run, measured, args.rounds)
                    if not args.no_browser:
                        browse(server, run, measured)
                    now, most = server.memory_mb()
                    measured.figures["the server's memory, now and at most"] = f"{now:.0f} MB, {most:.0f} MB"
        written = text(measured, {"events": f"{args.events:,}", **about})
    print(written)
    if not args.quick:
        put_between_markers(RESULTS, "dashboard", written)


if __name__ == "__main__":
    main()
