"""Open a recorded run and ask for its tables, facts, findings and report.

    run = stepscope.open_run("stepscope-runs/20260101-120000-train")
    run.diagnosis.findings[0].where

Each stage is computed on first use and kept. Heavy imports happen then, so that `import stepscope.api` is cheap.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import UnreadableInputError
from stepscope.model import Analysis, Diagnosis, Report

if TYPE_CHECKING:
    from stepscope.tables.schema import Tables

READABLE = "a run folder that `stepscope run` or `stepscope.profile` wrote (it holds host-*/ or rank-*/)"
MAX_SUGGESTED = 3  # run folders named when a folder of runs was given


class Run:
    """One recorded run. Make it with `open_run`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reports: dict[bool, Report] = {}

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @cached_property
    def tables(self) -> Tables:
        """The run's typed columns; also written to RUN/tables where that folder can be written."""
        from stepscope import tables
        from stepscope.read import read_run

        built = tables.build(read_run(self.folder))
        _store(built, self.folder)
        return built

    @cached_property
    def analysis(self) -> Analysis:
        """All facts of the run. The user's own files are read, where they are still there, to name exact lines."""
        from stepscope.analyze import analyze, user_files
        from stepscope.report.source import SourceReader

        reader = SourceReader(self.tables.run.user_roots)
        texts = {file: reader.text(file) for file in user_files(self.tables)}
        return analyze(self.tables, {file: text for file, text in texts.items() if text is not None})

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The findings, in order of cost, and the rules that could not be judged."""
        from stepscope.diagnose import diagnose

        return diagnose(self.analysis)

    def report(self, *, source: bool = True) -> Report:
        """The document that the terminal, JSON and HTML show; `source=False` quotes no line of source text."""
        from stepscope import report

        if source not in self._reports:
            self._reports[source] = report.build(self.analysis, self.diagnosis, source=source)
        return self._reports[source]


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run folder.

    Raises `UnreadableInputError` if `path` is none; what is inside is read when it is first asked for, which raises
    the same error if not a single line of it can be read.
    """
    folder = Path(path)
    if not folder.exists():
        raise UnreadableInputError(f"{folder}: no such folder; name {READABLE}")
    if not folder.is_dir():
        raise UnreadableInputError(f"{folder}: a file; this version reads {READABLE}")
    try:
        if is_run_folder(folder):
            return Run(folder.resolve())
        runs = sorted(child.name for child in folder.iterdir() if child.is_dir() and is_run_folder(child))
    except OSError as error:
        raise UnreadableInputError(f"{folder}: {error.strerror}; name {READABLE}") from None
    if runs:
        named = ", ".join(str(folder / name) for name in runs[-MAX_SUGGESTED:])
        raise UnreadableInputError(f"{folder}: holds {len(runs)} runs, name one of them, e.g. {named}")
    raise UnreadableInputError(f"{folder}: nothing recorded in it; name {READABLE}")


def is_run_folder(folder: Path) -> bool:
    """True when `folder` holds a part that a recorder writes."""
    return any(child.is_dir() and child.name.startswith(("host-", "rank-")) for child in folder.iterdir())


def _store(built: Tables, folder: Path) -> None:
    """Keep the tables beside the run; a folder that cannot be written is no reason to fail."""
    from stepscope.tables import store

    if not os.access(folder, os.W_OK):
        return
    try:
        store.write(built, folder)
    except OSError:
        return  # full disk, or taken away in the meantime: the tables can always be derived again
