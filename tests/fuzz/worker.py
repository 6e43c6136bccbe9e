"""Reads damaged inputs one by one: numbers of cases on standard input, a line of JSON for each on the output."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path

from rich.console import Console

from stepscope.api import ReadOptions, open_run
from stepscope.dashboard import single, terminal
from stepscope.errors import StepscopeError
from stepscope.report.document import read_report, report_bytes
from tests.fuzz import cases, pool

WHOLE_PAGE_EVERY = 20  # cases: it costs ten times the rest
OPTIONS = ReadOptions(cache=False, keep=False, workers=1)


def main() -> None:
    folder = Path(sys.argv[1])
    out, sys.stdout = sys.stdout, io.StringIO()
    seeds = cases.Seeds(folder / f"process-{os.getpid()}" / "seeds")
    faults = dict(part.split(":") for part in os.environ.get("STEPSCOPE_FUZZ_FAULT", "").split(",") if part)
    for number in map(int, sys.stdin.read().split()):
        print(json.dumps({"case": number}), file=out, flush=True)
        place = folder / f"case-{number}"
        place.mkdir()
        path = cases.make(number, place, seeds)
        _forget_peak()
        began = time.monotonic()
        word, text = _read(path, whole=number % WHOLE_PAGE_EVERY == 0, fault=faults.get(str(number)))
        row = {"case": number, "word": word, "text": text, "seconds": time.monotonic() - began}
        print(json.dumps({**row, "most_bytes": _peak_bytes()}), file=out, flush=True)
        shutil.rmtree(place, ignore_errors=True)


def _read(path: Path, *, whole: bool, fault: str | None) -> tuple[str, str]:
    """("report", ""), ("refused", the line) or ("traceback", where and what)."""
    try:
        _go_wrong(fault)
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


def _go_wrong(how: str | None) -> None:
    """As a test wants it."""
    if how == "raise":
        raise ValueError(how)
    if how == "wait":
        time.sleep(1000)
    if how == "take":
        bytearray(pool.MAX_BYTES + 1).count(1)
    if how == "die":
        os._exit(3)


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


main()
