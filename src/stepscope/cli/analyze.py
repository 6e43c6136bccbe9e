"""`stepscope analyze`: a recorded run, or traces that others recorded → the report, on the terminal and in files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.options import (
    CsvFile,
    Define,
    Device,
    DiffPath,
    DiffSpan,
    DiffWorker,
    FailOn,
    Filter,
    Force,
    Group,
    HtmlFile,
    JsonFile,
    Library,
    NoCache,
    NoSource,
    PathMap,
    Sort,
    SourceRoot,
    Span,
    Step,
    Steps,
    Table,
    TablesFolder,
    Top,
    Worker,
    parse_checks,
    read_options,
    spare_memory,
)
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.api import Run
    from stepscope.model import Report
    from stepscope.report import outputs


def analyze(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="A run folder, or files of traces, stacks or torch_xla, and folders."),
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
    table: Table = None,
    sort: Sort = None,
    top: Top = None,
    filter_: Filter = None,
    group: Group = None,
    worker: Worker = None,
    span: Span = None,
    device: Device = None,
    step: Step = None,
    define: Define = False,
    csv_file: CsvFile = None,
    diff: DiffPath = None,
    diff_worker: DiffWorker = None,
    diff_span: DiffSpan = None,
    fail_on: FailOn = None,
) -> None:
    """Show the report of a recorded run, or of traces, sampled stacks or torch_xla reports from anywhere.

    Takes a run folder of stepscope; or one or more traces (.json, .json.gz), folders of ranks, or a log folder of
    tensorboard_trace_handler; or files of sampled stacks; or reports and logs of torch_xla (a metrics report,
    XLA_METRICS_FILE, PT_XLA_DEBUG), those of one run together. Beside a run folder's files, RUN/report.json and
    RUN/report.html are brought up to date where it can be written; nothing is written beside other files. With
    `--json -` or `--html -`, stdout holds that document alone.

    With `--table NAME` one table is shown in full instead: overview, steps, gpus, operators, stacks, kernels, memory,
    memory-curve, memory-operators, memory-lines, memory-blocks, memory-states, out-of-memory, modules, counters,
    communication, distributed, distributed-collectives; of compilers, also without traces: compiles (`--group cause` or
    `change`), compile-steps (`--group kind` or `step`), graph-breaks, transfers, xla-metrics. `--json` and `--csv` then
    write that table. With `--diff PATH` two traces, spans or runs are set side by side. Memory snapshots
    (`_dump_snapshot`) and files of `export_memory_timeline` may be given as PATH too, alone or beside traces.

    `--define` says below a table what its columns mean, as docs/metrics.md does for every figure. Of GPUs: utilisation
    is the part of the time in which at least one kernel runs; 100 % does not mean that the GPU is full. SM efficiency
    and occupancy are estimates from the sizes of launches; tensor cores are detected by kernel name.

    With `--fail-on recompile` or `--fail-on graph-break` the exit status is 1 if the run holds one, and a line on
    stderr says which and where; 4 if nothing in it could tell. A report of torch_xla does not tell a recompile from a
    first compile: there the check is the rule "too frequent".
    """
    from stepscope import api
    from stepscope.cli import settings
    from stepscope.cli.tables import TableOptions, show_diff, show_table
    from stepscope.report import outputs

    wanted = TableOptions(
        table=table,
        sort=sort,
        top=top,
        pattern=filter_,
        group=group,
        worker=worker,
        span=span,
        device=device,
        step=step,
        define=define,
        diff_worker=diff_worker,
        diff_span=diff_span,
        json_file=json_file,
        csv_file=csv_file,
        force=force,
        against=diff,
    )
    checks = parse_checks(fail_on)
    if checks and diff is not None:
        raise UsageError("--fail-on checks one run; leave out --diff")
    wanted.check(html_file)
    plan = outputs.Plan(json_file=json_file, html_file=html_file, force=force)
    spare_memory(paths)
    with outputs.reading("reading") as progress:
        options = read_options(
            source_root=source_root,
            map_=map_,
            library=library,
            steps=steps,
            tables=tables,
            no_cache=no_cache,
            progress=progress,
            ignored=settings.load().ignore,
        )
        run = api.open_run(*paths, options=options)
        other = api.open_run(diff, options=options) if diff is not None else None
        if not wanted.any:
            plan.check(run.folder if run.recorded else None)
            report = run.report(source=not no_source)
        for opened in filter(None, (run, other)) if wanted.any else ():
            opened.load()  # the long part, while progress is shown
    if other is not None:
        show_diff(run, other, wanted)
    elif table is not None:
        show_table(run, wanted)
    else:
        _show_report(run, report, plan, paths, source=not no_source)
    if checks:
        from stepscope.cli.checks import judge

        raise typer.Exit(judge(run, checks, source=not no_source))


def _show_report(run: Run, report: Report, plan: outputs.Plan, paths: list[Path], *, source: bool) -> None:
    from stepscope.dashboard import single
    from stepscope.report import outputs

    render = single.renderer(run, source=source)
    with outputs.progress("making the page"):
        page = outputs.refresh(report, run.folder, render) if run.recorded else None
    if not plan.uses_stdout:
        names = " ".join(shlex.quote(str(path)) for path in paths)
        outputs.show(report, page=page, again=None if run.recorded else f"stepscope analyze {names} --html report.html")
    plan.write(report, render)
