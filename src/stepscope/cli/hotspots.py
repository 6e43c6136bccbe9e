"""`stepscope hotspots`: the deepest functions by sampled time, of a run or of stack files that others recorded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Struct

from stepscope.cli.options import (
    CsvFile,
    Force,
    JsonFile,
    OneRank,
    Parked,
    PathMap,
    Phase,
    ProcessKind,
    Reading,
    Rows,
    SourceRoot,
    argument,
    option,
)
from stepscope.errors import UnreadableInputError, UsageError

if TYPE_CHECKING:
    from stepscope.api import Run
    from stepscope.model.sampled import Hotspots

DEFAULT_ROWS = 10  # of each table on a terminal; files get all
ALL = "all"
NO_STACKS = (
    "no sampled stacks in it; `stepscope run` records them (`stepscope doctor` says what keeps it from doing so), "
    "and `py-spy record --format raw --idle --threads --subprocesses` does"
)


def hotspots(
    paths: Annotated[
        list[Path] | None, argument("PATH...", "A run folder, or files of sampled stacks and folders of them.")
    ] = None,
    library: Annotated[
        str | None,
        option(
            "--library NAME|PATH",
            "Name the innermost frame of this library in each row: a whole part of the path (flow is flow.py and "
            "pkg/flow/net.py, not workflow.py), a module (pkg.flow), or with a slash a path. Your own code by default.",
        ),
    ] = None,
    aggregate: Annotated[
        bool,
        option(
            "--aggregate-leaf-paths/--no-aggregate-leaf-paths",
            "One row for all call paths that end in the same frame and pass the same frame of the library, or one "
            "row for each call path.",
        ),
    ] = True,
    rows: Rows = None,
    by: Annotated[str, option("--by WHAT", "What a row is: line, function, file or module.")] = "line",
    phase: Phase = None,
    rank: OneRank = None,
    process: ProcessKind = "all",
    parked: Parked = False,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
    source_root: SourceRoot = None,
    map_: PathMap = None,
    force: Force = False,
    file: Annotated[list[Path] | None, option("--file", None, hidden=True)] = None,
    library_name: Annotated[str | None, option("--library-name", None, hidden=True)] = None,
    num_rows: Annotated[str | None, option("--num-rows", None, hidden=True)] = None,
) -> None:
    """Show which functions the sampled stacks stand in, most samples first.

    Takes a run folder of stepscope, or files that py-spy (raw, speedscope) and other samplers wrote, alone or a folder
    of them together. Every stack counts once, for its innermost frame. Beside that frame stands the innermost frame of
    a library on the way there, your own code unless --library names another.

    Waiting and working are shown apart; nothing is dropped: top-level code, native frames and stacks without a Python
    frame are rows too. Left out, and counted, are launchers, helper processes and helper threads that are parked in a
    wait. The lines below the tables say what the samples are of and what to beware of.

    With --json FILE or --csv FILE what is shown is written; `-` is stdout. --file, --library-name and --num-rows are
    accepted as older names of PATH, --library and --rows.
    """
    from stepscope import api
    from stepscope.analyze.host.hotspots import GROUPS, HotspotOptions
    from stepscope.analyze.host.stack_selection import PROCESSES, StackSelection
    from stepscope.report import outputs

    if paths and file:
        raise UsageError("PATH and --file both name what to read; give one of them")
    given = paths or file
    if not given:
        raise UsageError(
            "nothing to read; name a run folder, or a file of sampled stacks: stepscope hotspots profile.txt"
        )
    wanted = Wanted(parse_rows(_one("--rows", rows, "--num-rows", num_rows)), json_file, csv_file)
    for spelled, value, known in (("--by", by, tuple(GROUPS)), ("--process", process, PROCESSES)):
        if value not in known:
            raise UsageError(f"{spelled} {value}: unknown; use {', '.join(known)}")
    outputs.check_files({"--json": json_file, "--csv": csv_file}, force=force)
    options = HotspotOptions(
        library=_one("--library", library, "--library-name", library_name),
        by=by,
        aggregate=aggregate,
        limit=wanted.limit,
        selection=StackSelection(phase=phase, rank=rank, process=process, parked=parked),
    )
    with outputs.reading("reading") as progress:
        run = api.open_run(*given, options=Reading(source_root=source_root, map_=map_).options(progress, rank=rank))
        segments = run.tables.segments.select("samples", "skipped_samples").fill_null(0)
        if not sum(segments.sum().row(0)):
            raise UnreadableInputError(f"{given[0]}: {NO_STACKS}")
        found = run.hotspots(options)
    wanted.put(run, found)


class Wanted(Struct, frozen=True):
    """What goes where. `rows` None is the usual number."""

    rows: int | None
    json_file: str | None
    csv_file: str | None

    @property
    def limit(self) -> int | None:
        """The most rows of working and of waiting; None is all."""
        if self.rows is None:
            return None if self.json_file or self.csv_file else DEFAULT_ROWS
        return self.rows or None

    def put(self, run: Run, found: Hotspots) -> None:
        """Write the files and, unless one of them is stdout, print the table."""
        from stepscope.dashboard import hotspots as report
        from stepscope.report import outputs
        from stepscope.report.words import Shortener

        if self.json_file is not None:
            outputs.emit(self.json_file, report.to_json(found, self.limit))
        if self.csv_file is not None:
            outputs.emit(self.csv_file, report.to_csv(found, self.limit))
        if outputs.STDOUT in (self.json_file, self.csv_file):
            return
        facts = run.tables.run
        shorten = Shortener({"cwd": facts.cwd or str(run.folder), "user_roots": facts.user_roots})
        shown = DEFAULT_ROWS if self.rows is None else self.limit
        report.show(found, outputs.console(sys.stdout), shorten, shown)


def parse_rows(text: str | None) -> int | None:
    """ "12" as a number and "all" as 0; None where nothing was said. Raises `UsageError`."""
    if text is None:
        return None
    if text == ALL:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or int(text) == 0:
        raise UsageError(f"--rows {text}: not a number of rows; give 1 or more, or all")
    return int(text)


def _one(new: str, value: str | None, old: str, old_value: str | None) -> str | None:
    if value is not None and old_value is not None:
        raise UsageError(f"{new} and {old} mean the same; give one of them")
    return value if value is not None else old_value
