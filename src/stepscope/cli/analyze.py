"""`stepscope analyze`: a recorded run → its report, on the terminal and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.options import Force, HtmlFile, JsonFile, NoSource


def analyze(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a recorded run.")],
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    no_source: NoSource = False,
    force: Force = False,
) -> None:
    """Show the report of a recorded run.

    Also brings RUN/report.json and RUN/report.html up to date where the folder can be written. With `--json -` or
    `--html -`, stdout holds that document alone.
    """
    from stepscope import api
    from stepscope.report import outputs

    plan = outputs.Plan(json_file=json_file, html_file=html_file, force=force)
    run = api.open_run(path)
    plan.check(run.folder)
    with outputs.progress("reading the run"):
        report = run.report(source=not no_source)
    page = outputs.refresh(report, run.folder)
    if not plan.uses_stdout:
        outputs.show(report, page=page)
    plan.write(report)
