"""`stepscope flamegraph`: sampled stacks of a run or a file, as a page, a picture, or for another viewer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec.structs import replace

from stepscope.cli.options import (
    Force,
    Library,
    NoCache,
    NoSource,
    OneRank,
    Parked,
    PathMap,
    Phase,
    ProcessKind,
    Reading,
    SourceRoot,
    argument,
    option,
)
from stepscope.errors import UsageError, refuse

if TYPE_CHECKING:
    from stepscope.model.sampled import FlameGraph

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
    from stepscope.analyze.host.stack_selection import StackSelection
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
