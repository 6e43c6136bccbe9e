"""The line about knobs: on the terminal, on the page, and in the document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stepscope.model.comparison import AppliedKnob, TrialFacts
from stepscope.report.document import build, read_report, report_bytes
from tests.dashboard.plain_pages import page_of
from tests.records import replace
from tests.report.fabricate import analysis, diagnosis
from tests.report.test_terminal import HOSTILE, shown, words_of


def knob(
    folder: Path, name: str, value: str, applied: bool = True, line: int | None = None, **fields: Any
) -> AppliedKnob:
    file = str(folder / "train.py") if line is not None else None
    return AppliedKnob(name, value, applied, file=file, line=line, **{"rank": 0, **fields})


def test_hostile_names_do_no_harm(folder: Path) -> None:
    bad = AppliedKnob(HOSTILE, HOSTILE, False, reason=HOSTILE, file=HOSTILE, line=3)
    facts = TrialFacts((bad,), None)
    report = build(replace(analysis(folder), trial=facts), diagnosis(folder))
    page, terminal = page_of(report), shown(report)

    assert "<script>x" not in page
    assert "\x1b" not in terminal
    assert "\u202e" not in terminal + page
    assert "[bold red]b[/]" in words_of(terminal)


def test_the_document_holds_it_all_and_is_json(folder: Path) -> None:
    facts = TrialFacts((knob(folder, "gc", "off", line=7),), 5)
    report = build(replace(analysis(folder), trial=facts), diagnosis(folder))
    view = json.loads(report_bytes(report))["views"]["trial"]

    assert (view["seed"], view["skipped"]) == (5, 0)
    assert view["standing"] == {"gc": "applied"}
    assert view["knobs"][0]["place"] == {"file": str(folder / "train.py"), "line": 7}
    assert view["knobs"][0]["code"].startswith("image = Image.open")
    assert read_report(report_bytes(report)) == report
