"""Counts the work of reading and analysis: `python benchmarks/guard.py`. Fails where it is more than its ceiling.

Counts are the same on a slow and on a busy machine, so CI can hold them: queries of Polars, calls of Python functions,
modules, memory, and how much there is to read. Of two traces of one kind the second is three times as long; what it
costs more is the cost of events, the rest is fixed. One figure is a time: that of the processor as a multiple of
unpacking and decoding the same file in the same process, with twice the measured one as its bound.

A change that needs more raises a number in `CEILINGS`, where the reviewer sees it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STEPS = 500  # of the shorter trace; the longer one has three times as many


@dataclass(frozen=True)
class Ceiling:
    """The most that a count may be, and why it is what it is. A tenth above what was counted with Python 3.11."""

    most: float
    why: str


CEILINGS = {
    "analyze: queries of Polars": Ceiling(
        350, "some for each table and fact; 527 when all views were made for one screen"
    ),
    "analyze: queries for the longer trace": Ceiling(26, "some for each stretch of the file, none for a step or slice"),
    "analyze: calls of Python functions, thousands": Ceiling(
        178, "rules, facts and a screen of text; 245 with all views"
    ),
    "analyze: calls for 1,000 more events": Ceiling(
        7_200, "steps of 14 slices, each with a name of its own; once 18,082"
    ),
    "report.json: queries of Polars": Ceiling(432, "all views and tables of the report beside the screen's"),
    "report.json: calls of Python functions, thousands": Ceiling(212, "all views as plain values"),
    "report.json: calls for 1,000 more events": Ceiling(10_100, "the steps are listed one by one, up to a bound"),
    "analyze: memory for the longer trace, MiB": Ceiling(
        40, "beyond a trace of few steps: libraries take what cores and kernel make of them; it unpacks to 4 MB"
    ),
    "analyze: processor time by unpacking and decoding": Ceiling(20, "twice what was measured"),
    "--help: modules": Ceiling(175, "no command has been imported"),
    "runs: modules": Ceiling(280, "a list of folders needs no Polars"),
    "analyze: modules": Ceiling(825, "Polars, NumPy, Rich and all analyses"),
    "compare: modules": Ceiling(845, "the same and the comparison"),
    "experiment --help: modules": Ceiling(180, "nothing is read before the first run"),
    "mcp --help: modules": Ceiling(180, "the protocol's package is imported by the server alone"),
    "package: lines, thousands": Ceiling(106.9, "Python and JSON, which all who come after read; 107 before"),
    "package: files of Python": Ceiling(350, "each costs a header and imports; 468 before nouns were joined"),
    "tests: lines, thousands": Ceiling(61.1, "as the package; 61.3 before"),
}
UNWANTED = ("torch", "pandas", "scipy.stats", "matplotlib", "mcp", "pydantic")


def main() -> int:
    """Count, print the table, and say what is above its ceiling."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        counted = dict(_counted(folder))
    width = max(map(len, CEILINGS))
    above = [name for name, ceiling in CEILINGS.items() if counted[name] > ceiling.most]
    for name, ceiling in CEILINGS.items():
        mark = "!" if name in above else " "
        print(f"{mark} {name:<{width}} {counted[name]:>10,.1f} of {ceiling.most:>8,.0f}  {ceiling.why}")
    for name in above:
        print(f"guard: {name}: {counted[name]:,.1f} is above {CEILINGS[name].most:,.0f}", file=sys.stderr)
    return 1 if above else 0


def _counted(folder: Path) -> list[tuple[str, float]]:
    sys.path.insert(0, str(ROOT))
    from tests import gpu_traces

    short, long = (folder / f"{name}.json.gz" for name in ("short", "long"))
    events = [len(gpu_traces.step(1)) * steps for steps in (STEPS, 3 * STEPS)]
    for path, steps in ((short, STEPS), (long, 3 * STEPS)):
        gpu_traces.write(path, steps=steps)
    found: list[tuple[str, float]] = []
    for what in ("analyze", "report.json"):
        few, many = (_inside(what, path) for path in (short, long))
        more = many["calls"] - few["calls"]
        found.append((f"{what}: queries of Polars", few["queries"]))
        if what == "analyze":
            found.append(("analyze: queries for the longer trace", many["queries"] - few["queries"]))
        found.append((f"{what}: calls of Python functions, thousands", few["calls"] / 1000))
        found.append((f"{what}: calls for 1,000 more events", 1000 * more / (events[1] - events[0])))
    few_steps = folder / "few.json.gz"
    gpu_traces.write(few_steps, steps=20)
    found.append(("analyze: memory for the longer trace, MiB", _inside("memory", few_steps, long)["mib"]))
    found.append(("analyze: processor time by unpacking and decoding", _inside("time", long)["ratio"]))
    commands = {
        "--help": ["--help"],
        "runs": ["runs", str(folder)],
        "analyze": ["analyze", "--no-cache", str(short)],
        "compare": ["compare", "--no-cache", str(short), str(long)],
        "experiment --help": ["experiment", "--help"],
        "mcp --help": ["mcp", "--help"],
    }
    for name, arguments in commands.items():
        modules = _inside("modules", *arguments)["modules"]
        unwanted = sorted(set(modules) & set(UNWANTED))
        assert not unwanted, f"{name} imports {', '.join(unwanted)}"
        found.append((f"{name}: modules", len(modules)))
    files = [file for file in (ROOT / "src" / "stepscope").rglob("*.*") if file.suffix in (".py", ".json")]
    files = [file for file in files if "static" not in file.parts]  # what the front end's build puts there
    found.append(("package: lines, thousands", _lines(files) / 1000))
    found.append(("package: files of Python", sum(file.suffix == ".py" for file in files)))
    found.append(("tests: lines, thousands", _lines((ROOT / "tests").rglob("*.py")) / 1000))
    return found


def _lines(files: Iterable[Path]) -> int:
    return sum(file.read_bytes().count(b"\n") for file in files)


def _inside(what: str, *arguments: object) -> dict[str, Any]:
    """What a process of its own counts."""
    command = [sys.executable, __file__, "--inside", what, *map(str, arguments)]
    threads = {"POLARS_MAX_THREADS": "2"}  # each takes memory of its own, and CI may have many cores
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tempfile.gettempdir(), env={**os.environ, **threads}
    )
    if ended.returncode:
        raise SystemExit(f"guard: {what}: {ended.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _count(what: str, arguments: list[str]) -> dict[str, Any]:
    if what == "modules":
        return {"modules": _modules(arguments)}
    path = Path(arguments[0])
    if what == "memory":
        _analyze(path, whole=False)
        before = _most_bytes()
        _analyze(Path(arguments[1]), whole=False)
        return {"mib": (_most_bytes() - before) / 2**20}
    if what == "time":
        _analyze(path, whole=False)  # what happens once, imports among it
        return {"ratio": _seconds(lambda: _analyze(path, whole=False)) / _seconds(lambda: _decode(path))}
    return _work(lambda: _analyze(path, whole=what == "report.json"))


def _analyze(path: Path, *, whole: bool) -> None:
    """As `stepscope analyze` does; `whole` makes all of the report."""
    import io

    from rich.console import Console

    from stepscope.api import ReadOptions, open_run
    from stepscope.dashboard import terminal
    from stepscope.report.document import report_bytes

    report = open_run(path, options=ReadOptions(cache=False, keep=False, workers=1)).report()
    terminal.render(report, Console(file=io.StringIO(), width=100))
    if whole:
        report_bytes(report)


def _decode(path: Path) -> None:
    import msgspec
    from isal import igzip

    msgspec.json.decode(igzip.open(path).read())


def _work(do: Callable[[], None]) -> dict[str, Any]:
    """Queries of Polars, and calls of Python functions on all threads; imports are left out."""
    import polars as pl

    do()  # what happens once, imports among it
    queries, calls = [0], [0]
    collect = pl.LazyFrame.collect
    eager = pl.LazyFrame._collect_eager

    def counting(original: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            queries[0] += 1
            return original(*arguments, **options)

        return counted

    def called(_frame: Any, event: str, _value: Any) -> None:
        calls[0] += event == "call"

    pl.LazyFrame.collect = counting(collect)  # type: ignore[method-assign]
    pl.LazyFrame._collect_eager = counting(eager)  # type: ignore[method-assign]
    threading.setprofile(called)
    sys.setprofile(called)
    try:
        do()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {"queries": queries[0], "calls": calls[0]}


def _modules(arguments: list[str]) -> list[str]:
    """What a command has imported when it ends."""
    import contextlib
    import io

    from stepscope.cli import main as command

    sys.argv = ["stepscope", *arguments]
    out, error = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with out, error, contextlib.suppress(SystemExit):
        command()
    return sorted(sys.modules)


def _seconds(do: Callable[[], None]) -> float:
    """The least processor time of five."""
    found = []
    for _ in range(5):
        before = time.process_time()
        do()
        found.append(time.process_time() - before)
    return min(found)


def _most_bytes() -> int:
    status = Path(f"/proc/{os.getpid()}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        print(json.dumps(_count(sys.argv[2], sys.argv[3:])))
    else:
        sys.exit(main())
