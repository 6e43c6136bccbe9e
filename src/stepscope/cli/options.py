"""Option types that several commands share, so that one name means one thing everywhere, and what their text means."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.api import Progress, ReadOptions

RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="The run folder, new or empty; stepscope-runs/<time>-<script> by default."
    ),
]
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write what is shown as JSON; - is stdout.")
]
HtmlFile = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="Write the report as a page; - is stdout.")
]
Rate = Annotated[float, typer.Option("--rate", metavar="HZ", help="Stack samples per second.")]
Rows = Annotated[
    str | None,
    typer.Option("--rows", metavar="N|all", help="Rows to show; 10 on a terminal, all in files by default."),
]
NoSource = Annotated[bool, typer.Option("--no-source", help="Quote no line of source text anywhere.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing of ours.")]
SourceRoot = Annotated[
    list[Path] | None,
    typer.Option(
        "--source-root",
        metavar="DIR",
        help="A folder of your code, by default all that is no known library; repeatable.",
    ),
]
PathMap = Annotated[
    list[str] | None,
    typer.Option("--map", metavar="OLD=NEW", help="Paths in the trace that begin with OLD lie in NEW; repeatable."),
]
Library = Annotated[
    list[str] | None,
    typer.Option("--library", metavar="NAME", help="A module or folder that is not your code; repeatable."),
]
TablesFolder = Annotated[
    Path | None, typer.Option("--tables", metavar="DIR", help="Keep the tables of traces there, not in the user cache.")
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Keep no tables of traces.")]
Steps = Annotated[str | None, typer.Option("--steps", metavar="A:B", help="Read steps A to B of traces only.")]
Table = Annotated[str | None, typer.Option("--table", metavar="NAME", help="Show one table in full; names above.")]
Sort = Annotated[
    str | None,
    typer.Option(
        "--sort",
        metavar="COLUMN",
        help="Order of a table: self_device, total_device, self_host, total_host, calls, self_memory, mean, max or a "
        "column of it.",
    ),
]
Top = Annotated[int | None, typer.Option("--top", metavar="N", help="Rows of a table; 0 is all. 30 on a terminal.")]
Filter = Annotated[
    str | None,
    typer.Option("--filter", metavar="REGEX", help="Rows of a table whose name matches; of stacks, the operator."),
]
Group = Annotated[
    str | None,
    typer.Option(
        "--group",
        metavar="BY",
        help="Rows of operators: name or shapes; of kernels: name or launch; of compiles: cause or change; of "
        "compile-steps: kind or step.",
    ),
]
Worker = Annotated[
    str | None, typer.Option("--worker", metavar="NAME", help="The worker a table is of; all by default.")
]
Span = Annotated[
    int | None, typer.Option("--span", metavar="N", help="The span a table is of, from 1 on; all by default.")
]
Device = Annotated[int | None, typer.Option("--device", metavar="N", help="The device a table is of; all by default.")]
Step = Annotated[int | None, typer.Option("--step", metavar="N", help="Operators of one step only.")]
Define = Annotated[bool, typer.Option("--define", help="Say below a table what its columns mean.")]
CsvFile = Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write the table as CSV; - is stdout.")]
DiffPath = Annotated[
    Path | None, typer.Option("--diff", metavar="PATH", help="Compare with this run, trace or folder of traces.")
]
DiffWorker = Annotated[
    str | None, typer.Option("--diff-worker", metavar="NAME", help="The worker of it to compare with.")
]
DiffSpan = Annotated[int | None, typer.Option("--diff-span", metavar="N", help="The span of it to compare with.")]
FailOn = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-on",
        metavar="CHECK",
        help="End with status 1 if the run holds one, with 4 if nothing could tell: recompile, graph-break; "
        "repeatable, or with commas.",
    ),
]
Phase = Annotated[
    str | None,
    typer.Option(
        "--phase",
        metavar="NAME",
        help="Only main threads in this phase: data_wait, forward, backward, optimizer, other or startup.",
    ),
]
OneRank = Annotated[int | None, typer.Option("--rank", metavar="N", help="Only this rank and its workers.")]
ProcessKind = Annotated[
    str, typer.Option("--process", metavar="KIND", help="Only main processes or loader workers: main, workers, all.")
]
Parked = Annotated[bool, typer.Option("--parked", help="Keep helper threads that are parked in a wait.")]

CHECKS = ("recompile", "graph-break")  # of `stepscope.analyze.compilers`, which takes long to import

LARGE_BYTES = 48 * 2**20  # of packed traces: some 600 MB unpacked
_STEPS = re.compile(r"(\d{1,18})(?::(\d{1,18}))?")


def spare_memory(paths: Sequence[Path]) -> None:
    """Let Polars give back at once what it frees if the files are large; before it is imported. 3 % of the time."""
    with contextlib.suppress(OSError):  # who opens them says what is wrong with them
        if sum(path.stat().st_size for path in paths if path.is_file()) >= LARGE_BYTES:
            os.environ.setdefault("_RJEM_MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0")


def read_options(
    *,
    source_root: list[Path] | None = None,
    map_: list[str] | None = None,
    library: list[str] | None = None,
    steps: str | None = None,
    tables: Path | None = None,
    no_cache: bool = False,
    progress: Progress | None = None,
    ignored: Mapping[str, str] | None = None,
    keep: bool = True,
) -> ReadOptions:
    """How a command reads what it is given, from the options that commands share; raises `UsageError`."""
    from stepscope.api import ReadOptions

    if tables is not None and no_cache:
        raise UsageError("--tables and --no-cache contradict each other; give one of them")
    return ReadOptions(
        tables=tables,
        cache=not no_cache,
        steps=parse_steps(steps),
        source_roots=tuple(source_root or ()),
        maps=parse_maps(map_),
        libraries=tuple(library or ()),
        progress=progress,
        ignored=ignored or {},
        keep=keep,
    )


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """ "10:20" or "10" as (first, last); raises `UsageError`."""
    if text is None:
        return None
    match = _STEPS.fullmatch(text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UsageError(f"--steps {text}: not a range of steps; give the first and the last, e.g. --steps 10:20")
    return int(match[1]), int(match[2] or match[1])


def parse_maps(texts: list[str] | None) -> tuple[tuple[str, str], ...]:
    """ "OLD=NEW" texts as pairs; raises `UsageError`."""
    pairs = []
    for text in texts or ():
        old, separator, new = text.partition("=")
        if not separator or not old or not new:
            raise UsageError(
                f"--map {text}: not OLD=NEW; give two beginnings of paths, e.g. --map /build/src=/home/me/src"
            )
        pairs.append((old, new))
    return tuple(pairs)


def parse_checks(texts: list[str] | None) -> tuple[str, ...]:
    """Names of checks, each once, several in a text separated by commas; raises `UsageError`."""
    names = [name.strip().replace("_", "-") for text in texts or () for name in text.split(",")]
    unknown = next((name for name in names if name not in CHECKS), None)
    if unknown is not None:
        raise UsageError(f"--fail-on {unknown or '(nothing)'}: no such check; there are {', '.join(CHECKS)}")
    return tuple(dict.fromkeys(names))
