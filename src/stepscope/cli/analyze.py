"""`stepscope analyze`: a recorded run, or traces that others recorded → the report on the terminal and in files; with
`--table NAME` or `--diff PATH` one table in full, on the terminal, as CSV or as JSON."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.options import (
    CsvFile,
    FailOn,
    Force,
    HtmlFile,
    JsonFile,
    NoSource,
    OneRank,
    OptionGroup,
    Priced,
    Reading,
    argument,
    judge,
    option,
    parse_checks,
    shortener,
)
from stepscope.errors import UnreadableInputError, UsageError, refuse
from stepscope.model.metrics import StepData

if TYPE_CHECKING:
    from stepscope.api import Run
    from stepscope.model import Report
    from stepscope.report.table import TableDocument


DIFF_TABLES = ("overview", "tensorboard", "operators", "kernels", "modules", "tree")
DIFF_SHOWN = ("overview", "operators", "kernels", "modules")  # when none is named
DIFF_ROWS = 8  # of each table when none is named
MOST_NAMES = 300  # characters of paths that `--brief` repeats
DEFAULT_ROWS = 30  # of a table on a terminal; files get all


class TableOptions(OptionGroup, frozen=True):
    table: Annotated[str | None, option("--table NAME", "Show one table in full; names above.")] = None
    sort: Annotated[
        str | None,
        option(
            "--sort COLUMN",
            "Order of a table: self_device, total_device, self_host, total_host, calls, self_memory, mean, max "
            "or a column of it.",
        ),
    ] = None
    top: Annotated[int | None, option("--top N", "Rows of a table; 0 is all. 30 on a terminal.")] = None
    filter_: Annotated[
        str | None, option("--filter REGEX", "Rows of a table whose name matches; of stacks, the operator.")
    ] = None
    group: Annotated[
        str | None,
        option(
            "--group BY",
            "Rows of operators: name or shapes; of kernels: name or launch; of compiles: cause or change; of "
            "compile-steps: kind or step; of metrics: value or curve.",
        ),
    ] = None
    worker: Annotated[str | None, option("--worker NAME", "The worker a table is of; all by default.")] = None
    span: Annotated[int | None, option("--span N", "The span a table is of, from 1 on; all by default.")] = None
    device: Annotated[int | None, option("--device N", "The device a table is of; all by default.")] = None
    step: Annotated[int | None, option("--step N", "Operators or metrics of one step only.")] = None
    define: Annotated[bool, option("--define", "Say below a table what its columns mean.")] = False
    csv: CsvFile = None
    diff: Annotated[Path | None, option("--diff PATH", "Compare with this run, trace or folder of traces.")] = None
    diff_worker: Annotated[str | None, option("--diff-worker NAME", "The worker of it to compare with.")] = None
    diff_span: Annotated[int | None, option("--diff-span N", "The span of it to compare with.")] = None

    def check(self, json_file: str | None, html_file: str | None, *, force: bool) -> bool:
        """Whether a table was asked for, and not the report.

        Raises `UsageError` for options that contradict each other or mean nothing, before the long work.
        """
        if self.table is None and self.diff is None:
            given = {name: getattr(self, name) for name in self.__struct_fields__}
            unused = next((name for name, value in given.items() if value is not None and value is not False), None)
            if unused is not None:
                option = "--" + unused.rstrip("_").replace("_", "-")
                raise UsageError(f"{option} belongs to a table; add --table NAME or --diff PATH")
            return False
        refuse(
            {
                "--html writes the report; leave out --table and --diff, or write --csv or --json": html_file
                is not None,
                "--diff with --json or --csv: which table? add --table " + " or ".join(DIFF_TABLES): (
                    self.table is None and bool(json_file or self.csv)
                ),
                f"--table {self.table}: not with --diff; there are {', '.join(DIFF_TABLES)}": (
                    self.diff is not None and self.table not in (None, *DIFF_TABLES)
                ),
                "--diff-worker and --diff-span belong to --diff PATH; add it": (
                    self.diff is None and (self.diff_worker is not None or self.diff_span is not None)
                ),
                f"--top {self.top}: a number of rows, or 0 for all": self.top is not None and self.top < 0,
            }
        )
        from stepscope.report.outputs import check_files

        check_files({"--json": json_file, "--csv": self.csv}, force=force)
        return True

    def rows(self, json_file: str | None) -> int | None:
        """How many rows: as asked, else all in files and a screenful on a terminal; 0 is all."""
        if self.top is not None:
            return self.top or None
        return None if json_file or self.csv else DEFAULT_ROWS


def analyze(
    paths: Annotated[
        list[Path],
        argument("PATH...", "A run folder, or files of traces, stacks or torch_xla, dumps of a hang, and folders."),
    ],
    reading: Reading,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    no_source: NoSource = False,
    force: Force = False,
    *,
    wanted: TableOptions,
    priced: Priced,
    fail_on: FailOn = None,
    brief: Annotated[
        bool, option("--brief", "Print the findings alone, as JSON of 4 kB, for coding agents and scripts.")
    ] = False,
) -> None:
    """Show the report of a recorded run, or of traces, sampled stacks or torch_xla reports from anywhere.

    Takes a run folder of stepscope; or one or more traces (.json, .json.gz), folders of ranks, or a log folder of
    tensorboard_trace_handler; or files of sampled stacks; or event files of TensorBoard, for their metrics; or reports
    and logs of torch_xla (a metrics report, XLA_METRICS_FILE, PT_XLA_DEBUG), those of one run together; or dumps of
    PyTorch's flight recorder and reports of `ncclras -f json`, also with a run folder (docs/hangs.md); or a trace of
    operators (.parquet), as StragglerAnalysis publishes them. Beside a run
    folder's files, RUN/report.json and RUN/report.html are brought up to date where it can be written; nothing is
    written beside other files. With `--json -` or `--html -`, stdout holds that document alone.

    With `--table NAME` one table is shown in full instead: overview, steps, gpus, operators, stacks, kernels, memory,
    memory-curve, memory-operators, memory-lines, memory-blocks, memory-states, out-of-memory, modules, counters,
    communication, distributed, distributed-collectives; of compilers, also without traces: compiles (`--group cause` or
    `change`), compile-steps (`--group kind` or `step`), graph-breaks, transfers, xla-metrics; energy, by device; of a
    hang, pending-calls and hang-ranks; and metrics, the values of all curves (`--group curve`: a line for each).
    `--json` and `--csv` then write that table. With `--diff PATH` two traces, spans or runs are set side by side.
    Memory snapshots (`_dump_snapshot`) and files of `export_memory_timeline` may be given as PATH too, alone or
    beside traces.

    `--define` says below a table what its columns mean, as docs/definitions.md does for every figure. Of GPUs:
    utilisation is the part of the time in which at least one kernel runs; 100 % does not mean that the GPU is full. SM
    efficiency and occupancy are estimates from the sizes of launches; tensor cores are detected by kernel name.

    `stepscope analyze RUN --price-kwh 0.30 --gpu-hour 1.80` says what the run cost, and what 1,000 of its steps do
    (docs/energy.md); `[energy]` in stepscope.toml gives prices once for all.

    With `--brief` stdout holds the findings alone, in at most 4 kB of JSON: cost, line, fix, what would prove it wrong
    and the command that proves it (docs/agents.md); RUN/report.json and RUN/report.html stay as they are.

    With `--fail-on recompile` or `--fail-on graph-break` the exit status is 1 if the run holds one, and a line on
    stderr says which and where; 4 if nothing in it could tell. A report of torch_xla does not tell a recompile from a
    first compile: there the check is the rule "too frequent".
    """
    from stepscope import api
    from stepscope.report import outputs

    checks = parse_checks(fail_on)
    of_table = wanted.check(json_file, html_file, force=force)
    refuse(
        {
            "--fail-on checks one run; leave out --diff": bool(checks) and wanted.diff is not None,
            "--brief is about the report; leave out --table and --diff": brief and of_table,
            "--brief prints to stdout; give --json and --html a file": brief and "-" in (json_file, html_file),
        }
    )
    plan = outputs.Plan(json_file=json_file, html_file=html_file, force=force)
    reading.start(paths)
    with outputs.reading("reading") as progress:
        options = reading.options(progress, judged=True, priced=priced)
        run = api.open_run(*paths, options=options)
        if run.recorded:
            from stepscope.record.host.scheduler import keep_accounting

            keep_accounting(run.folder)
        none = reading.steps is not None and run.tables.steps.is_empty()
        refuse({f"--steps {reading.steps}: no such step was recorded; leave it out to see all": none})
        other = api.open_run(wanted.diff, options=options) if wanted.diff is not None else None
        if not of_table:
            plan.check(run.folder if run.recorded else None)
            _prepare()
            report = run.report(source=not no_source)
        for opened in filter(None, (run, other)) if of_table else ():
            opened.load()  # the long part, while progress is shown
    if other is not None:
        _show_diff(run, other, wanted, json_file)
    elif of_table:
        _show_table(run, wanted, json_file)
    else:
        from stepscope.dashboard import terminal

        def render(report: Report) -> str:
            from stepscope.dashboard import single

            return single.render(run, report, source=not no_source)

        names = " ".join(shlex.quote(str(path)) for path in paths)
        if brief:
            from stepscope.report.brief import Page, findings

            whole = f"stepscope analyze {names if len(names) < MOST_NAMES else 'PATH'} --json FILE has all"
            outputs.emit(outputs.STDOUT, findings(report, Page(), more=whole))
        else:
            with outputs.progress("making the page"):
                page = outputs.refresh(report, run.folder, render) if run.recorded else None
            if not plan.uses_stdout:
                again = None if run.recorded else f"stepscope analyze {names} --html report.html"
                terminal.show_report(report, page=page, again=again)
        plan.write(report, render)
    if checks:
        raise typer.Exit(judge(run, checks, source=not no_source))


def _prepare() -> None:
    """Import what the report needs before its trace is asked for, which a process beside this one may be reading."""
    from stepscope import analyze, diagnose  # noqa: F401
    from stepscope.dashboard import terminal  # noqa: F401
    from stepscope.report import document  # noqa: F401


def _show_table(run: Run, wanted: TableOptions, json_file: str | None) -> None:
    from stepscope.analyze.views.select import TABLES, Selection
    from stepscope.report.table import Choice, of_run

    table = (wanted.table or "").replace("_", "-")
    if table not in TABLES:
        raise UsageError(f"--table {wanted.table}: no such table; there are {', '.join(TABLES)}")
    selection = Selection(
        worker=wanted.worker, span=wanted.span, device=wanted.device, step=wanted.step, group=wanted.group
    )
    shown = of_run(run, table, selection, Choice(wanted.sort, wanted.rows(json_file), wanted.filter_))
    _put([shown], run, wanted, json_file)


def _show_diff(run: Run, other: Run, wanted: TableOptions, json_file: str | None) -> None:
    from stepscope.analyze.views.select import Selection
    from stepscope.report.table import Choice, diff_shown, document

    found = run.diff(
        other,
        selection=Selection(worker=wanted.worker, span=wanted.span),
        against=Selection(worker=wanted.diff_worker, span=wanted.diff_span),
    )
    top = wanted.rows(json_file) if wanted.table or wanted.top is not None else DIFF_ROWS
    choice = Choice(wanted.sort, top, wanted.filter_)
    documents = [
        document(
            "diff",
            found.tables.get(name, ()),
            choice,
            absent=found.absent.get(name, "nothing to compare"),
            shown=diff_shown(name, found),
        )
        for name in ((wanted.table,) if wanted.table else DIFF_SHOWN)
    ]
    _put(documents, run, wanted, json_file, notes=found.notes)


def _put(
    documents: list[TableDocument],
    run: Run,
    wanted: TableOptions,
    json_file: str | None,
    notes: tuple[str, ...] = (),
) -> None:
    from stepscope.dashboard import terminal
    from stepscope.report import outputs, table
    from stepscope.report.escape import one_line
    from stepscope.report.words import Shortener

    if json_file is not None:
        outputs.emit(json_file, table.to_json(documents[0]))
    if wanted.csv is not None:
        outputs.emit(wanted.csv, table.to_csv(documents[0]))
    if outputs.STDOUT in (json_file, wanted.csv):
        return
    console = outputs.console(sys.stdout)
    shorten = Shortener({"cwd": str(run.folder), "user_roots": run.tables.run.user_roots})
    for found in documents:
        terminal.show_table(found, console, shorten, define=wanted.define)
    for note in notes:
        console.print(one_line(note), soft_wrap=True)


MAX_STEPS = 12  # named where the wanted one is not kept


def batch(
    path: Annotated[Path, argument("RUN", "A run folder.")],
    step: Annotated[
        int | None, option("--step N", "Name the samples of this step and of the two batches before.")
    ] = None,
    rank: OneRank = None,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Say which samples of the data set a step was trained on, and which steps' loss or gradient norm went wrong.

    While a run is recorded, every loss that `backward` is called on and every gradient norm that the script clips by
    are held against the 200 before. The first that is not finite, or leaps far beyond them, is an alarm, kept with the
    indices of its batch and of the two before it, and with file names and targets where the data set has them in plain
    lists (`samples`, `imgs`, `files`, `paths`, `image_files`, `targets`). Without --step the alarms are listed.

    Of other steps the indices are kept as long as there is room: 24,000 steps of 64 samples at least. An iterable data
    set has no indices; then the position of the batch in the loader's order is all there is.
    """
    from stepscope import api
    from stepscope.analyze.input import batches
    from stepscope.report import batches as report
    from stepscope.report import outputs

    outputs.check_files({"--json": json_file}, force=force)
    with outputs.reading("reading") as progress:
        run = api.open_run(path, options=Reading().options(progress))
        if not run.recorded:
            raise UsageError(f"{path}: no run folder; the data of steps is known where `stepscope run` recorded them")
        if rank not in (None, *(ranks := run.tables.run.ranks)):
            raise UsageError(f"--rank {rank}: no such rank in it; there are {', '.join(map(str, ranks))}")
        found = tuple(alarm for alarm in batches.alarms(run.tables) if rank in (None, alarm.rank))
        if step is None and not found and run.tables.metrics.is_empty():
            raise UnreadableInputError(
                f"{path}: no loss and no gradient norm in it; they are recorded from `backward` and clipping"
            )
    logged: tuple[StepData, ...] = ()
    if step is not None:
        told = batches.of_step(found, step)
        logged = () if told else batches.logged(run.tables, run.folder, step, rank)
        if not told and not logged:
            raise UsageError(f"--step {step}: {_kept(batches.steps_told(found))}")
        found = told
    if json_file is not None:
        outputs.emit(json_file, report.to_json(found, logged, step))
    if json_file == outputs.STDOUT:
        return
    shorten = shortener(run)
    console = outputs.console(sys.stdout)
    if step is not None:
        report.show_step(found, logged, console, shorten)
        return
    first = next((alarm.step for alarm in found if alarm.step is not None and alarm.batches), None)
    report.show_list(found, console, shorten, f"Their samples: stepscope batch {path} --step {first}")


def _kept(steps: list[int]) -> str:
    why = "no batch of it was kept: there is no such step, it had no loader of torch, or there was no more room"
    if not steps:
        return why
    named = ", ".join(map(str, steps[:MAX_STEPS])) + (", …" if len(steps) > MAX_STEPS else "")
    return f"{why}; those of steps {named} were, as a loss or a norm went wrong there"
