"""`stepscope compare A B`: what changed between two runs, sets of runs, traces or spans, and whether it is faster."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct

from stepscope.cli.checks import FAILED, NOT_JUDGED, PASSED, say
from stepscope.cli.options import Force, Library, NoCache, NoSource, PathMap, Quiet, SourceRoot, read_options
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.model.comparison import Comparison

SLOWER = "slower"
_CHECK = re.compile(r"slower=([0-9]{1,6}(?:\.[0-9]{1,6})?)\s?%")


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="The baseline: a run, a folder of runs, or traces.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What is compared with it.")],
    worker: Annotated[str | None, typer.Option("--worker", metavar="NAME", help="Of A: only traces of it.")] = None,
    span: Annotated[int | None, typer.Option("--span", metavar="N", help="Of A: only this span, from 1 on.")] = None,
    against_worker: Annotated[
        str | None, typer.Option("--against-worker", metavar="NAME", help="Of B: only traces of this worker.")
    ] = None,
    against_span: Annotated[
        int | None, typer.Option("--against-span", metavar="N", help="Of B: only this span, from 1 on.")
    ] = None,
    top: Annotated[
        int | None, typer.Option("--top", metavar="N", help="Rows of each kind on the terminal; 0 is all. 5 usually.")
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            metavar="CHECK",
            help="slower=X%: end with status 1 if B is slower by X % or more, with 4 if that cannot be told.",
        ),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the comparison as JSON; - is stdout.")
    ] = None,
    html_file: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write the comparison as a page; - is stdout.")
    ] = None,
    csv_file: Annotated[
        str | None, typer.Option("--csv", metavar="FILE", help="Write what changed as CSV; - is stdout.")
    ] = None,
    source_root: SourceRoot = None,
    map_: PathMap = None,
    library: Library = None,
    no_cache: NoCache = False,
    no_source: NoSource = False,
    force: Force = False,
    quiet: Quiet = False,
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
    from stepscope.report import outputs

    limits = _limits(limit := parse_slower(fail_on))
    if top is not None and top < 0:
        raise UsageError(f"--top {top}: a number of rows, or 0 for all")
    wanted = _Wanted(json_file, html_file, csv_file, top, source=not no_source, quiet=quiet)
    outputs.check_files(wanted.files, force=force)
    with outputs.reading("reading") as progress:
        options = read_options(
            source_root=source_root,
            map_=map_,
            library=library,
            no_cache=no_cache,
            progress=progress,
            ignored=_ignored(),
        )
        found = comparing.compare(
            a,
            b,
            options=options,
            selection=Selection(worker=worker, span=span),
            against=Selection(worker=against_worker, span=against_span),
            limits=limits,
        )
    wanted.put(found)
    if limit is not None:
        raise typer.Exit(_judge(found, limit, quiet=quiet))


def parse_slower(texts: list[str] | None) -> float | None:
    """The smallest fraction of "slower=3%" texts, several separated by commas; raises `UsageError`."""
    fractions = []
    for text in (part.strip() for given in texts or () for part in given.split(",")):
        match = _CHECK.fullmatch(text)
        if match is None:
            raise UsageError(f"--fail-on {text or '(nothing)'}: no such check; give slower=X%, e.g. slower=3%")
        fractions.append(float(match[1]) / 100)
    return min(fractions, default=None)


class _Wanted(Struct, frozen=True):
    """What goes where."""

    json_file: str | None
    html_file: str | None
    csv_file: str | None
    top: int | None
    source: bool
    quiet: bool

    @property
    def files(self) -> dict[str, str | None]:
        return {"--json": self.json_file, "--html": self.html_file, "--csv": self.csv_file}

    def put(self, found: Comparison) -> None:
        """Write the files and, unless one of them is stdout, print the comparison."""
        from stepscope.dashboard.pages import compare as page
        from stepscope.report import comparison_report, outputs
        from stepscope.report.values import json_bytes

        document: dict[str, Any] = comparison_report.comparison_document(found, source=self.source)
        if self.json_file is not None:
            outputs.emit(self.json_file, json_bytes(document))
        if self.html_file is not None:
            outputs.emit(self.html_file, page.render(document).encode("utf-8"))
        if self.csv_file is not None:
            outputs.emit(self.csv_file, comparison_report.to_csv(found.changes))
        if outputs.STDOUT not in self.files.values() and not self.quiet:
            comparison_report.render(document, outputs.console(sys.stdout), top=self.top)


def _limits(fraction: float | None) -> Any:
    """An effect that was asked for matters, however small it is."""
    from stepscope.comparison.sides import Limits

    usual = Limits()
    return usual if fraction is None or fraction == 0 else Limits(threshold=min(usual.threshold, fraction))


def _ignored() -> Any:
    from stepscope.cli import settings

    return settings.load().ignore


def _judge(found: Comparison, limit: float, *, quiet: bool) -> int:
    """Say what the check came to, and return the exit status."""
    from stepscope.comparison.verdicts import slower_by

    seen = slower_by(found, limit)
    name = f"{SLOWER}={limit * 100:g}%"
    if seen.slower is None:
        outcome, status = f"{name} cannot be judged", NOT_JUDGED
    else:
        outcome, status = (f"check failed: {name}", FAILED) if seen.slower else (f"check passed: {name}", PASSED)
    if not quiet:
        say(f"{outcome}: {seen.text}")
    return status
