"""Our own reader, timed like its peers: `python stepscope_read.py MODE FOLDER RESULT TRACE…`.

read      the traces' columns, chunk by chunk, thrown away: what reading alone takes
build     traces to complete Parquet tables (nested, linked, with steps), below FOLDER; from there, if it holds them
analyze   the command `stepscope analyze`, report and page included, with its tables below FOLDER

`--workers N` builds from several traces in N processes; 1 without it. A mode imports what it needs before it is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gauge import measure

Work = Callable[[], dict[str, Any]]


def read(paths: list[Path]) -> Work:
    """Take every chunk of every trace."""
    from stepscope.read.kineto import KinetoTrace

    def work() -> dict[str, Any]:
        events = 0
        for path in paths:
            source = KinetoTrace(path)
            for _ in source.chunks():
                pass
            events += source.summary().quality.events
        return {"events": events}

    return work


def build(paths: list[Path], folder: Path, workers: int) -> Work:
    """Tables of all traces, kept below `folder`."""
    from stepscope import tables
    from stepscope.read import read_paths

    def work() -> dict[str, Any]:
        built = tables.build(read_paths(paths), tables.BuildOptions(cache=folder, workers=workers))
        return {"events": int(built.traces["events"].sum()), "slices": built.events.height}

    return work


def analyze(paths: list[Path], folder: Path) -> Work:
    """The command line's work, its output included."""
    from stepscope.__main__ import spare_memory

    spare_memory(map(str, paths))  # before what analyses is imported, as the command does
    import stepscope.analyze
    import stepscope.cli.analyze
    import stepscope.dashboard.single
    import stepscope.dashboard.terminal
    import stepscope.diagnose
    import stepscope.report.outputs
    import stepscope.tables

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # what is kept by default, and nothing kept from before
    words = ["analyze", *map(str, paths)]
    words += ["--json", str(folder / "report.json"), "--html", str(folder / "report.html")]

    def work() -> dict[str, Any]:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            try:
                stepscope.cli.main(words)
            except SystemExit as end:
                if end.code:
                    raise RuntimeError(f"stepscope analyze ended with {end.code}") from end
        return {"shown_characters": len(shown.getvalue())}

    return work


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("read", "build", "analyze"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out")
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    works: dict[str, Callable[[], Work]] = {
        "read": lambda: read(args.traces),
        "build": lambda: build(args.traces, args.folder, args.workers),
        "analyze": lambda: analyze(args.traces, args.folder),
    }
    measure(works[args.mode](), args.out)


if __name__ == "__main__":
    main()
