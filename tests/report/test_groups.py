"""A cause leads, what it explains stands below it and is no loss in addition; sources that disagree are said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.model import Diagnosis, Report
from stepscope.report.document import build
from stepscope.report.sentences import groups, members
from tests.dashboard.plain_pages import page_of
from tests.on_terminal import joined
from tests.records import replace
from tests.report.fabricate import analysis, diagnosis, three_findings


def reported(folder: Path, **explains: tuple[int, ...]) -> Report:
    """The three fabricated findings, the first explaining those at `first`, and so on by number."""
    found = three_findings(str(folder / "train.py"))
    names = ("first", "second", "third")
    linked = [
        replace(one, explains=tuple(found[index].id for index in explains.get(name, ())))
        for name, one in zip(names, found, strict=True)
    ]
    return build(analysis(folder), Diagnosis(tuple(linked), diagnosis(folder).abstained))


def ids(report: Report) -> list[list[str]]:
    return [[row["rule"] for row in (group.finding, *group.explained)] for group in groups(report)]


def test_a_group_stands_where_its_most_expensive_member_does(folder: Path) -> None:
    report = reported(folder, third=(0,))
    assert ids(report) == [["io.blocking", "input.loader_bound"], ["launch.python_loop"]]
    assert [row["rule"] for row in report.findings] == ["input.loader_bound", "launch.python_loop", "io.blocking"]
    assert [row["rule"] for row in members(report, 1)] == ["io.blocking", "input.loader_bound"]


def test_a_chain_is_one_group_and_a_finding_is_shown_once(folder: Path) -> None:
    assert ids(reported(folder, first=(1, 2), second=(2,))) == [
        ["input.loader_bound", "launch.python_loop", "io.blocking"]
    ]


@pytest.mark.parametrize("explains", [{"first": (1,), "second": (0,)}, {"first": (0,)}])
def test_a_circle_in_a_foreign_report_hides_nothing(folder: Path, explains: dict[str, Any]) -> None:
    report = reported(folder, **explains)
    assert sorted(name for group in ids(report) for name in group) == sorted(row["rule"] for row in report.findings)


def test_terminal_and_page_say_that_it_is_no_loss_in_addition(folder: Path) -> None:
    report = reported(folder, first=(1,))
    text = joined(report)
    assert "1 critical Waiting for the loader" in text
    assert "Explains A Python loop calls cross_entropy once per item (5.1 ms a step, 8.3 %; not in addition)" in text
    assert "2 warning" not in text
    assert "2 info torch.save" in text
    page = page_of(report)
    assert "<h3>1. Waiting for the loader" in page
    assert "<h3>1.1 A Python loop" in page
    assert "<h3>2. torch.save" in page
    assert "not in addition" in page
