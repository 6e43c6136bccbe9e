"""A page of made-up facts, without a run behind: what `analyze --html` writes where no front end was built."""

from __future__ import annotations

from pathlib import Path

from stepscope.api import Run
from stepscope.dashboard import single
from stepscope.model import Analysis, Diagnosis, Report
from tests.builders import make_tables
from tests.report.fabricate import analysis


def run_of(report: Report, facts: Analysis) -> Run:
    """A run without tables that says these."""
    run = Run((Path(facts.run.folder),), recorded=False)
    vars(run).update(tables=make_tables(), analysis=facts, diagnosis=Diagnosis((), ()))
    return run.showing(report)


def page_of(report: Report, facts: Analysis | None = None) -> str:
    """The page of a report of `facts`; those of `fabricate` by default."""
    run = run_of(report, analysis(Path(report.run["cwd"])) if facts is None else facts)
    page = single.plain(report, single.documents(run, report))
    assert single.UNMADE not in page, page[page.index(single.UNMADE) :][:400]
    return page
