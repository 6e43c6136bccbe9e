"""The line about knobs: on the terminal, on the page, and in the document."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stepscope.model.comparison import AppliedKnob, TrialFacts
from stepscope.report import build
from stepscope.report.document import read_report, report_bytes
from tests.dashboard.plain_pages import page_of
from tests.records import replace
from tests.report.fabricate import analysis, diagnosis, write_script
from tests.report.test_terminal import HOSTILE, shown, words_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_script(tmp_path)
    return tmp_path


def knob(
    folder: Path, name: str, value: str, applied: bool = True, line: int | None = None, **fields: Any
) -> AppliedKnob:
    file = str(folder / "train.py") if line is not None else None
    return AppliedKnob(name, value, applied, file=file, line=line, **{"rank": 0, **fields})


def both(folder: Path, *knobs: AppliedKnob, **fields: Any) -> tuple[str, str]:
    """(terminal, page) of a run with these."""
    facts = TrialFacts(knobs, **{"losses": (), "seed": None, **fields})
    report = build(replace(analysis(folder), trial=facts), diagnosis(folder))
    return words_of(shown(report, width=100)), page_of(report)


def test_a_run_without_knobs_has_no_line(folder: Path) -> None:
    report = build(analysis(folder), diagnosis(folder))

    assert report.views["trial"] is None
    assert "Knobs" not in shown(report)
    assert "Knobs" not in page_of(report)


def test_knobs_that_were_applied_and_one_that_was_not(folder: Path) -> None:
    terminal, page = both(
        folder,
        knob(folder, "loader.num_workers", "2", line=7),
        knob(folder, "amp.dtype", "bf16", applied=False, reason="the script runs no autocast"),
        seed=3,
        losses=((0, 1.0), (1, 0.5)),
    )
    said = (
        "loader.num_workers=2 (applied, train.py:7); amp.dtype=bf16 NOT applied: the script runs no autocast; "
        "seed 3; the loss of 2 steps is kept"
    )

    assert f"Knobs {said}" in terminal
    assert f"<p class='unexplained'>Knobs: {said}</p>" in page
    assert "not all were applied" in page


def test_the_line_stands_before_the_findings(folder: Path) -> None:
    terminal, page = both(folder, knob(folder, "gc", "off"))

    assert terminal.index("Knobs gc=off (applied)") < terminal.index("Where a step goes")
    assert page.index("Knobs: gc=off (applied)") < page.index("<article") < page.index("Where a mean step goes")
    assert "<p>Knobs: gc=off (applied)" in page
    assert "not all were applied" not in page


def test_a_knob_at_some_places_and_not_at_others(folder: Path) -> None:
    terminal, _ = both(
        folder,
        knob(folder, "loader.num_workers", "2", line=7),
        knob(folder, "loader.num_workers", "2", line=9),
        knob(folder, "loader.num_workers", "2", applied=False, line=14, reason="it has workers of its own"),
    )

    assert (
        "loader.num_workers=2 (applied, train.py:7 and 1 more; not at train.py:14: it has workers of its own)"
        in terminal
    )


def test_a_rank_that_refused(folder: Path) -> None:
    terminal, _ = both(folder, knob(folder, "gc", "off"), knob(folder, "gc", "off", applied=False, rank=3))

    assert "gc=off NOT applied on rank 3" in terminal


def test_a_run_with_a_seed_alone(folder: Path) -> None:
    assert "Knobs none; seed 9; 2 entries could not be read" in both(folder, seed=9, skipped=2)[0]


def test_many_knobs_are_counted(folder: Path) -> None:
    terminal, _ = both(folder, *(knob(folder, f"env:A{i}", "1") for i in range(300)))

    assert "env:A7=1 (applied); 292 more knobs" in terminal


def test_hostile_names_do_no_harm(folder: Path) -> None:
    bad = AppliedKnob(HOSTILE, HOSTILE, False, reason=HOSTILE, file=HOSTILE, line=3)
    facts = TrialFacts((bad,), ((0, math.nan), (1, -math.inf), (2, 1.5)), None)
    report = build(replace(analysis(folder), trial=facts), diagnosis(folder))
    page, terminal = page_of(report), shown(report)

    assert "<script>x" not in page
    assert "\x1b" not in terminal
    assert "\u202e" not in terminal + page
    assert "[bold red]b[/]" in words_of(terminal)


def test_the_document_holds_it_all_and_is_json(folder: Path) -> None:
    facts = TrialFacts(
        (knob(folder, "gc", "off", line=7),), ((0, math.nan), (1, -math.inf), (2, 1.5)), 5, losses_rank=0
    )
    report = build(replace(analysis(folder), trial=facts), diagnosis(folder))
    view = json.loads(report_bytes(report))["views"]["trial"]

    assert view["losses"] == [[0, "nan"], [1, "-inf"], [2, 1.5]]
    assert (view["seed"], view["losses_rank"], view["skipped"]) == (5, 0, 0)
    assert view["standing"] == {"gc": "applied"}
    assert view["knobs"][0]["place"] == {"file": str(folder / "train.py"), "line": 7}
    assert view["knobs"][0]["code"].startswith("image = Image.open")
    assert read_report(report_bytes(report)) == report
