"""Runs cases in processes that may be ended: one that hangs or takes too much memory takes no other with it.

`python -m tests.fuzz.pool FOLDER` reads damaged inputs one by one: numbers of cases on standard input, a line of JSON
for each on the output.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from stepscope.api import ReadOptions, open_run
from stepscope.dashboard import single, terminal
from stepscope.errors import StepscopeError
from stepscope.report.document import read_report, report_bytes
from tests.fuzz import cases

CASE_S = 60.0  # a case takes some tenths of a second; on a busy machine ten times that
START_S = 120.0  # for a process to be ready
MAX_BYTES = 2**30
TOLD_EVERY = 500  # cases
_TAKING = threading.Lock()


@dataclass
class Outcome:
    """What became of the cases, by word; `bad` are lines on those that must not be."""

    tell: Callable[[str], object]
    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    seconds: float = 0.0
    most_bytes: int = 0
    slowest_s: float = 0.0

    def text(self) -> str:
        """A table of one line each, then the bad ones."""
        lines = [f"{word:10} {self.counts[word]:7,}" for word in ("report", "refused", "traceback", "hang", "memory")]
        most = self.most_bytes / 2**20
        lines.append(f"in {self.seconds:.0f} s; slowest {self.slowest_s:.1f} s, most memory {most:.0f} MiB")
        return "\n".join([*lines, *self.bad])

    def take(self, row: dict[str, Any]) -> None:
        """A case is over."""
        word, most = row["word"], row["most_bytes"]
        self.counts[word] += 1
        self.most_bytes, self.slowest_s = max(self.most_bytes, most), max(self.slowest_s, row["seconds"])
        if word not in ("report", "refused"):
            self.bad.append(f"case {row['case']}: {row['text']}")
        if most > MAX_BYTES:
            self.counts["memory"] += 1
            self.bad.append(f"case {row['case']}: {most / 2**20:.0f} MiB")
        if sum(self.counts.values()) % TOLD_EVERY == 0:
            self.tell(f"{sum(self.counts.values()):,} cases, {len(self.bad)} bad")


def run(
    numbers: Sequence[int], folder: Path, *, workers: int = 2, tell: Callable[[str], object] = lambda _: None
) -> Outcome:
    """Run the cases with these numbers; inputs lie below `folder` while they are read."""
    outcome, began = Outcome(tell), time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda at: _share(list(numbers[at::workers]), folder, outcome), range(workers)))
    outcome.seconds = time.monotonic() - began
    return outcome


def _share(numbers: list[int], folder: Path, outcome: Outcome) -> None:
    """Run these cases in one process, and in another those behind one that it did not survive."""
    command = [sys.executable, "-m", "tests.fuzz.pool", str(folder)]
    environment = {**os.environ, "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
    while numbers:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(" ".join(map(str, numbers)) + "\n")
            process.stdin.close()
            hung = threading.Event()
            watch = _watch(START_S, process, hung)
            for line in process.stdout:  # of each case one when it begins and one when it is over
                watch.cancel()
                watch = _watch(CASE_S, process, hung)
                row = json.loads(line)
                if "word" in row:
                    with _TAKING:
                        outcome.take(row)
                    numbers.pop(0)
            watch.cancel()
        if numbers:
            text = f"hang: nothing for {CASE_S:.0f} s" if hung.is_set() else f"its process ended with {process.wait()}"
            word = "hang" if hung.is_set() else "traceback"
            with _TAKING:
                outcome.take({"case": numbers.pop(0), "word": word, "text": text, "seconds": 0.0, "most_bytes": 0})


def _watch(seconds: float, process: subprocess.Popen[str], hung: threading.Event) -> threading.Timer:
    """Ends the process after so long."""

    def end() -> None:
        hung.set()
        process.kill()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


WHOLE_PAGE_EVERY = 20  # cases: it costs ten times the rest
OPTIONS = ReadOptions(cache=False, keep=False, workers=1)


def main() -> None:
    folder = Path(sys.argv[1])
    out, sys.stdout = sys.stdout, io.StringIO()
    seeds = cases.Seeds(folder / f"process-{os.getpid()}" / "seeds")
    for number in map(int, sys.stdin.read().split()):
        print(json.dumps({"case": number}), file=out, flush=True)
        place = folder / f"case-{number}"
        place.mkdir()
        path = cases.make(number, place, seeds)
        _forget_peak()
        began = time.monotonic()
        word, text = _read(path, whole=number % WHOLE_PAGE_EVERY == 0)
        row = {"case": number, "word": word, "text": text, "seconds": time.monotonic() - began}
        print(json.dumps({**row, "most_bytes": _peak_bytes()}), file=out, flush=True)
        shutil.rmtree(place, ignore_errors=True)


def _read(path: Path, *, whole: bool) -> tuple[str, str]:
    """("report", ""), ("refused", the line) or ("traceback", where and what)."""
    try:
        run = open_run(path, options=OPTIONS)
        report = run.report()
        assert read_report(report_bytes(report)).schema == report.schema
        terminal.render(report, Console(file=io.StringIO(), width=100))
        pages = [single.plain(report, single.documents(run, report))]
        if whole:
            pages.append(single.render(run, report))
        assert not any(single.UNMADE in page for page in pages), "a page could not be made"
    except StepscopeError as error:
        return "refused", str(error)
    except BaseException as error:  # noqa: BLE001 - this is what is looked for
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return (
            "traceback",
            f"{type(error).__name__} in {frame.filename}:{frame.lineno} {frame.name}: {str(error)[:200]}",
        )
    return "report", ""


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


if __name__ == "__main__":
    main()
