"""`stepscope hotspots`: the deepest functions by sampled time, of a run or of stack files that others recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Struct
from msgspec.structs import replace

from stepscope.cli.options import (
    CsvFile,
    Force,
    JsonFile,
    Library,
    NoCache,
    NoSource,
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
    shortener,
)
from stepscope.errors import UnreadableInputError, UsageError, refuse

if TYPE_CHECKING:
    from stepscope.api import Run
    from stepscope.model.sampled import FlameGraph, Hotspots


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
    from stepscope.analyze.host.hotspots import GROUPS, PROCESSES, HotspotOptions, StackSelection
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

        if self.json_file is not None:
            outputs.emit(self.json_file, report.to_json(found, self.limit))
        if self.csv_file is not None:
            outputs.emit(self.csv_file, report.to_csv(found, self.limit))
        if outputs.STDOUT in (self.json_file, self.csv_file):
            return
        shorten = shortener(run)
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


OTHERS = "others"
# Suffix of the file to write -> format; the longest that fits counts.
FORMATS = {
    ".html": "page",
    ".htm": "page",
    ".svg": "svg",
    ".speedscope.json": "speedscope",
    ".collapsed": "collapsed",
    ".folded": "collapsed",
}
_INPUTS = (".raw", ".txt", ".json", ".gz", ".folded", ".collapsed", ".speedscope")
_MIN_NODES = 500  # of a tree; a page of so few boxes fits whatever their names are


def flamegraph(
    paths: Annotated[
        list[Path], argument("PATH...", "A run folder, or files of stacks, or traces, and folders of them.")
    ],
    out: Annotated[
        str | None,
        option(
            "--out -o NAME",
            "The file to write: .html, .svg, .speedscope.json or .collapsed. INPUT.flame.html here by default.",
        ),
    ] = None,
    phase: Phase = None,
    rank: OneRank = None,
    process: ProcessKind = "all",
    by: Annotated[
        str | None,
        option(
            "--by WHAT", "One box per function or per line of it: function by default, line where ranks are compared."
        ),
    ] = None,
    tree: Annotated[str | None, option("--tree KEY", "The tree to begin with, or to write: process:main.")] = None,
    diff: Annotated[
        str | None, option("--diff PATH", "Compare with this run or file; others compares --rank with them.")
    ] = None,
    min_share: Annotated[float, option("--min-share PERCENT", "Leave out paths below this share of a tree.")] = 0.05,
    parked: Parked = False,
    source_root: SourceRoot = None,
    map_: PathMap = None,
    library: Library = None,
    no_source: NoSource = False,
    no_cache: NoCache = False,
    force: Force = False,
) -> None:
    """Draw sampled stacks as an interactive flame graph, in one file that needs no network.

    Takes a run folder of stepscope, or files of sampled stacks (py-spy raw or speedscope, collapsed stacks). Of a run
    whose steps are known widths are milliseconds per step; else samples. The page has one tree for everything and one
    for each phase, kind of process and rank, and searches, zooms and turns upside down. Traces of torch.profiler with
    stacks, in a run or given as PATH, add trees of device time and of host time by line, operator and kernel.

    With `--diff PATH` two runs are set against each other, and with `--rank 1 --diff others` a rank against the mean of
    the others: red has grown, blue has shrunk. A picture (.svg) and collapsed stacks hold one tree: the first, or the
    one that `--tree` names.
    """
    from stepscope import api
    from stepscope.analyze.host.hotspots import StackSelection
    from stepscope.analyze.pictures.flame_tree import BY, Limits
    from stepscope.analyze.pictures.sampled_flame import FlameOptions
    from stepscope.report import outputs

    name = out
    if name is None:  # INPUT.flame.html in the current folder
        stem = paths[0].resolve().name or "samples"
        while Path(stem).suffix in _INPUTS and Path(stem).stem:
            stem = Path(stem).stem
        name = f"{stem}.flame.html"
    form = "page"
    if name != outputs.STDOUT:
        by_length = sorted(FORMATS, key=len, reverse=True)
        suffix = next((each for each in by_length if name.lower().endswith(each)), None)
        if suffix is None:
            raise UsageError(f"{name}: its ending names no format; use {', '.join(FORMATS)}")
        form = FORMATS[suffix]
        outputs.check_files({"--out": name}, force=force)
    by = by or ("line" if diff == OTHERS else "function")
    one_rank = "--diff others: compares one rank with the others; name it, e.g. --rank 1 --diff others"
    refuse(
        {
            f"--by {by}: unknown; use {' or '.join(BY)}": by not in BY,
            f"--min-share {min_share:g}: not a share in percent; give 0 to 100, e.g. --min-share 0.1": (
                not 0 <= min_share < 100
            ),
            one_rank: diff == OTHERS and rank is None,
        }
    )
    wanted = FlameOptions(
        selection=StackSelection(phase=phase, rank=rank, process=process, parked=parked),
        by=by,
        limits=Limits(min_share=min_share / 100),
        source=not no_source,
    )
    reading = Reading(source_root=source_root, map_=map_, library=library, no_cache=no_cache)
    with outputs.reading("reading") as progress:
        options = reading.options(progress, rank=rank)
        run = api.open_run(*paths, options=options)
        run.load()
        other = api.open_run(diff, options=options) if diff not in (None, OTHERS) else None
        if other is not None:
            other.load()

    def draw(nodes: int) -> FlameGraph:
        """With at most so many boxes in a tree."""
        chosen = replace(wanted, limits=replace(wanted.limits, max_nodes=nodes))
        if other is not None:
            return run.flame_diff(other, chosen)
        if diff == OTHERS and rank is not None:
            return run.flame_rank_diff(rank, chosen)
        return run.flame_graph(chosen)

    with outputs.progress("drawing"):
        text = _rendered(draw, form, tree)
    outputs.emit(name, text.encode("utf-8"))


def _rendered(draw: Callable[[int], FlameGraph], form: str, key: str | None) -> str:
    from stepscope.analyze.pictures.flame_tree import MAX_NODES
    from stepscope.dashboard import single
    from stepscope.report import flame

    nodes = MAX_NODES
    graph = draw(nodes)
    tree = graph.trees[0] if key is None else next((each for each in graph.trees if each.key == key), None)
    if tree is None:
        raise UsageError(f"--tree {key}: no such tree here; there are {', '.join(each.key for each in graph.trees)}")
    if form == "svg":
        return flame.picture(graph, tree)
    if form == "collapsed":
        return flame.collapsed(graph, tree)
    if form == "speedscope":
        from stepscope import __version__

        return flame.speedscope(graph, __version__)
    text = single.flame_page(graph, first=tree.key)
    while len(text.encode("utf-8")) > single.MAX_BYTES and nodes > _MIN_NODES:
        nodes //= 2
        text = single.flame_page(draw(nodes), first=tree.key)
    return text
