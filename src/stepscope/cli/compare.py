"""`stepscope compare A B`: what changed between two runs, sets of runs, traces or spans, and whether it is faster."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli import say
from stepscope.cli.options import (
    FAILED,
    NOT_JUDGED,
    OUTCOMES,
    PASSED,
    Force,
    Library,
    NoCache,
    NoSource,
    PathMap,
    Priced,
    Quiet,
    Reading,
    SourceRoot,
    argument,
    option,
)
from stepscope.errors import UsageError

_CHECK = re.compile(r"slower=([0-9]{1,6}(?:\.[0-9]{1,6})?)\s?%")


def compare(
    a: Annotated[Path, argument("A", "The baseline: a run, a folder of runs, or traces.")],
    b: Annotated[Path, argument("B", "What is compared with it.")],
    worker: Annotated[str | None, option("--worker NAME", "Of A: only traces of it.")] = None,
    span: Annotated[int | None, option("--span N", "Of A: only this span, from 1 on.")] = None,
    against_worker: Annotated[str | None, option("--against-worker NAME", "Of B: only traces of this worker.")] = None,
    against_span: Annotated[int | None, option("--against-span N", "Of B: only this span, from 1 on.")] = None,
    top: Annotated[int | None, option("--top N", "Rows of each kind on the terminal; 0 is all. 5 usually.")] = None,
    fail_on: Annotated[
        list[str] | None,
        option(
            "--fail-on CHECK",
            "slower=X%: end with status 1 if B is slower by X % or more, with 4 if that cannot be told.",
        ),
    ] = None,
    json_file: Annotated[str | None, option("--json FILE", "Write the comparison as JSON; - is stdout.")] = None,
    html_file: Annotated[str | None, option("--html FILE", "Write the comparison as a page; - is stdout.")] = None,
    csv_file: Annotated[str | None, option("--csv FILE", "Write what changed as CSV; - is stdout.")] = None,
    source_root: SourceRoot = None,
    map_: PathMap = None,
    library: Library = None,
    no_cache: NoCache = False,
    no_source: NoSource = False,
    force: Force = False,
    quiet: Quiet = False,
    *,
    priced: Priced,
) -> None:
    """Say whether B is faster than A, by how much, and what changed.

    A and B are each a run folder, a folder or a pattern in quotes ('runs/*-baseline') of several, or traces of
    torch.profiler. The mean step time is the headline: it is what a user pays. The median, the 95th percentile, samples
    per second and what is paid before the first step stand beside it. Below it stands what grew, shrank, came or went:
    phases, functions and lines by sampled time, operators and kernels of windows, findings, the environment.

    Two runs of the same program are never equally fast. A verdict therefore needs several runs of each side, made in
    turns: they are paired in the order in which they started, and from three pairs on there is a 95 % interval. With
    one run each there is no verdict, only what the steps show.

    With `--fail-on slower=3%` the exit status is 1 if B is slower by 3 % or more, 0 if that can be ruled out, and 4 if
    the runs cannot tell; a line on stderr says what was seen. With `--json -` stdout holds the document alone.
    """
    from stepscope import comparing
    from stepscope.analyze.views.select import Selection
    from stepscope.comparison.thresholds import THRESHOLD, Limits
    from stepscope.comparison.verdicts import slower_by
    from stepscope.dashboard import terminal
    from stepscope.dashboard.pages import compare as page
    from stepscope.report import comparison_report, outputs
    from stepscope.report.escape import json_bytes

    fractions = []
    for text in (part.strip() for given in fail_on or () for part in given.split(",")):
        match = _CHECK.fullmatch(text)
        if match is None:
            raise UsageError(f"--fail-on {text or '(nothing)'}: no such check; give slower=X%, e.g. slower=3%")
        fractions.append(float(match[1]) / 100)
    limit = min(fractions, default=None)
    # an effect that was asked for matters, however small it is
    limits = Limits(threshold=min(THRESHOLD, limit or THRESHOLD))
    if top is not None and top < 0:
        raise UsageError(f"--top {top}: a number of rows, or 0 for all")
    files = {"--json": json_file, "--html": html_file, "--csv": csv_file}
    outputs.check_files(files, force=force)
    reading = Reading(source_root=source_root, map_=map_, library=library, no_cache=no_cache)
    with outputs.reading("reading") as progress:
        found = comparing.compare(
            a,
            b,
            options=reading.options(progress, judged=True, priced=priced),
            selection=Selection(worker=worker, span=span),
            against=Selection(worker=against_worker, span=against_span),
            limits=limits,
        )
    document = comparison_report.comparison_document(found, source=not no_source)
    if json_file is not None:
        outputs.emit(json_file, json_bytes(document))
    if html_file is not None:
        outputs.emit(html_file, page.render(document).encode("utf-8"))
    if csv_file is not None:
        outputs.emit(csv_file, comparison_report.to_csv(found.changes))
    if outputs.STDOUT not in files.values() and not quiet:
        terminal.show_comparison(document, outputs.console(sys.stdout), top=top)
    if limit is not None:
        slower, seen = slower_by(found, limit)
        name = f"slower={limit * 100:g}%"
        status = NOT_JUDGED if slower is None else FAILED if slower else PASSED
        if not quiet:
            outcome = f"{name} cannot be judged" if slower is None else f"{OUTCOMES[status]}: {name}"
            say(f"{outcome}: {seen}")
        raise typer.Exit(status)
