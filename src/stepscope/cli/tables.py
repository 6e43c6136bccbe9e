"""`stepscope analyze --table NAME` and `--diff PATH`: one table in full, on the terminal, as CSV or as JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.api import Run
    from stepscope.report.table import TableDocument

DIFF_TABLES = ("overview", "tensorboard", "operators", "kernels", "modules", "tree")
OF_PROFILED = ("operators", "kernels", "modules", "stacks")  # whose times are of profiled steps alone
DIFF_SHOWN = ("overview", "operators", "kernels", "modules")  # when none is named
DIFF_ROWS = 8  # of each table when none is named
DEFAULT_ROWS = 30  # of a table on a terminal; files get all


class TableOptions(Struct, frozen=True):
    """What was asked for on the command line."""

    table: str | None = None
    sort: str | None = None
    top: int | None = None
    pattern: str | None = None
    group: str | None = None
    worker: str | None = None
    span: int | None = None
    device: int | None = None
    step: int | None = None
    define: bool = False
    diff_worker: str | None = None
    diff_span: int | None = None
    json_file: str | None = None
    csv_file: str | None = None
    force: bool = False
    against: Path | None = None

    @property
    def any(self) -> bool:
        """Whether a table or a comparison was asked for, and not the report."""
        return self.table is not None or self.against is not None

    def check(self, html_file: str | None) -> None:
        """Raise `UsageError` for options that contradict each other or mean nothing, before the long work."""
        if not self.any:
            self._check_unused()
            return
        if html_file is not None:
            raise UsageError("--html writes the report; leave out --table and --diff, or write --csv or --json")
        if self.against is not None and self.table is None and (self.json_file or self.csv_file):
            raise UsageError("--diff with --json or --csv: which table? add --table " + " or ".join(DIFF_TABLES))
        if self.against is not None and self.table not in (None, *DIFF_TABLES):
            raise UsageError(f"--table {self.table}: not with --diff; there are {', '.join(DIFF_TABLES)}")
        if self.against is None and (self.diff_worker is not None or self.diff_span is not None):
            raise UsageError("--diff-worker and --diff-span belong to --diff PATH; add it")
        if self.top is not None and self.top < 0:
            raise UsageError(f"--top {self.top}: a number of rows, or 0 for all")
        from stepscope.report.outputs import check_files

        check_files({"--json": self.json_file, "--csv": self.csv_file}, force=self.force)

    def _check_unused(self) -> None:
        given = {
            "--sort": self.sort,
            "--top": self.top,
            "--filter": self.pattern,
            "--group": self.group,
            "--worker": self.worker,
            "--span": self.span,
            "--device": self.device,
            "--step": self.step,
            "--define": self.define or None,
            "--csv": self.csv_file,
            "--diff-worker": self.diff_worker,
            "--diff-span": self.diff_span,
        }
        unused = next((name for name, value in given.items() if value is not None), None)
        if unused:
            raise UsageError(f"{unused} belongs to a table; add --table NAME or --diff PATH")

    @property
    def rows(self) -> int | None:
        """How many rows: as asked, else all in files and a screenful on a terminal; 0 is all."""
        if self.top is not None:
            return self.top or None
        return None if self.json_file or self.csv_file else DEFAULT_ROWS


def show_table(run: Run, options: TableOptions) -> None:
    """Print or write the table of `run`."""
    from stepscope.analyze.views.select import TABLES, Selection

    table = (options.table or "").replace("_", "-")
    if table not in TABLES:
        raise UsageError(f"--table {options.table}: no such table; there are {', '.join(TABLES)}")
    selection = Selection(
        worker=options.worker,
        span=options.span,
        device=options.device,
        step=options.step,
        group=options.group,
        name=options.pattern if table == "stacks" else None,
    )
    found = run.table(table, selection)
    pattern = None if table == "stacks" else options.pattern
    from stepscope.report import sentences
    from stepscope.report.table import Choice, document

    slowed = sentences.profiled(run.profiled) if table in OF_PROFILED else None
    notes = (*found.notes, slowed) if slowed else found.notes
    choice = Choice(options.sort, options.rows, pattern)
    _put([document(table, found.rows, choice, notes=notes, absent=found.absent)], run, options)


def show_diff(run: Run, other: Run, options: TableOptions) -> None:
    """Print or write what differs between two runs, traces or spans."""
    from stepscope.analyze.views.select import Selection
    from stepscope.report.table import Choice, diff_shown, document

    found = run.diff(
        other,
        selection=Selection(worker=options.worker, span=options.span),
        against=Selection(worker=options.diff_worker, span=options.diff_span),
    )
    names = (options.table,) if options.table else DIFF_SHOWN
    top = options.rows if options.table or options.top is not None else DIFF_ROWS
    documents = []
    for name in names:
        shown = diff_shown(name, found)
        rows = found.tables.get(name, ())
        absent = found.absent.get(name, "nothing to compare")
        choice = Choice(options.sort, top, options.pattern)
        documents.append(document("diff", rows, choice, absent=absent, shown=shown))
    _put(documents, run, options, notes=found.notes)


def _put(documents: list[TableDocument], run: Run, options: TableOptions, notes: tuple[str, ...] = ()) -> None:
    from stepscope.report import outputs, table
    from stepscope.report.escape import one_line
    from stepscope.report.words import Shortener

    if options.json_file is not None:
        outputs.emit(options.json_file, table.to_json(documents[0]))
    if options.csv_file is not None:
        outputs.emit(options.csv_file, table.to_csv(documents[0]))
    if outputs.STDOUT in (options.json_file, options.csv_file):
        return
    console = outputs.console(sys.stdout)
    shorten = Shortener({"cwd": str(run.folder), "user_roots": run.tables.run.user_roots})
    for index, found in enumerate(documents):
        if index:
            console.print()
        table.show(found, console, shorten, define=options.define)
    for note in notes:
        console.print(one_line(note), soft_wrap=True)
