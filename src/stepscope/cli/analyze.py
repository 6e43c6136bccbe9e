"""`stepscope analyze`: a recorded run, or traces that others recorded → the report, on the terminal and in files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.options import (
    Force,
    HtmlFile,
    JsonFile,
    Library,
    NoCache,
    NoSource,
    PathMap,
    SourceRoot,
    Steps,
    TablesFolder,
    parse_maps,
    parse_steps,
)
from stepscope.errors import UsageError


def analyze(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="A run folder, or trace files and folders of them.")
    ],
    source_root: SourceRoot = None,
    map_: PathMap = None,
    library: Library = None,
    steps: Steps = None,
    tables: TablesFolder = None,
    no_cache: NoCache = False,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    no_source: NoSource = False,
    force: Force = False,
) -> None:
    """Show the report of a recorded run, or of traces that torch.profiler wrote anywhere.

    Takes a run folder of stepscope; or one or more traces (.json, .json.gz), folders of ranks, or a log folder of
    tensorboard_trace_handler. Beside a run folder's files, RUN/report.json and RUN/report.html are brought up to date
    where it can be written; beside traces of others nothing is. With `--json -` or `--html -`, stdout holds that
    document alone.
    """
    from stepscope import api
    from stepscope.report import outputs

    if tables is not None and no_cache:
        raise UsageError("--tables and --no-cache contradict each other; give one of them")
    plan = outputs.Plan(json_file=json_file, html_file=html_file, force=force)
    with outputs.reading("reading") as progress:
        options = api.ReadOptions(
            tables=tables,
            cache=not no_cache,
            steps=parse_steps(steps),
            source_roots=tuple(source_root or ()),
            maps=parse_maps(map_),
            libraries=tuple(library or ()),
            progress=progress,
        )
        run = api.open_run(*paths, options=options)
        plan.check(run.folder if run.recorded else None)
        report = run.report(source=not no_source)
    page = outputs.refresh(report, run.folder) if run.recorded else None
    if not plan.uses_stdout:
        names = " ".join(shlex.quote(str(path)) for path in paths)
        outputs.show(report, page=page, again=None if run.recorded else f"stepscope analyze {names} --html report.html")
    plan.write(report)
