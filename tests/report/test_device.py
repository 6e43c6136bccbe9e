"""Traces in the report: quality before any figure, device time by kind, lines by device time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.diagnose import RULES
from stepscope.model import (
    Abstention,
    Analysis,
    DeviceLine,
    DeviceLines,
    DeviceTime,
    Diagnosis,
    Place,
    ReadingFacts,
    Report,
    TraceFacts,
)
from stepscope.report.document import build
from tests.dashboard.plain_pages import page_of
from tests.records import replace
from tests.report.fabricate import analysis, kept, run_facts
from tests.report.test_terminal import HOSTILE, shown, words_of

MS = 1_000_000
TRACE = "worker0.pt.trace.json"
READING = kept("reading", ReadingFacts)


def trace_facts(**changes: Any) -> TraceFacts:
    return replace(kept("trace", TraceFacts), **changes)


def device_time(scope: str, **changes: Any) -> DeviceTime:
    return replace(kept("device_time", DeviceTime), scope=scope, **changes)


def device_line(file: str, line: int, ns: int, **changes: Any) -> DeviceLine:
    line_facts = {"place": Place(file, line, "main"), "ns": ns, "share": ns / (500 * MS), "ms_per_step": ns / MS / 10}
    top = (("gemm_kernel", ns),)
    return replace(kept("device_line", DeviceLine), **{**line_facts, "via": {"sequence": ns}, "top": top, **changes})


def foreign(folder: Path, **changes: Any) -> Analysis:
    """What is known of a trace that something else recorded: no stacks, no journal, no command."""
    lines = kept("device_lines", DeviceLines, str(folder / "train.py"))
    run = run_facts(folder, command=(), hosts=(), exit_status=None, started_ns=None)
    facts = analysis(
        folder,
        run=run,
        stacks=None,
        loader=None,
        loops=None,
        io=None,
        windows=(),
        processes=(),
        traces=(trace_facts(),),
        reading=READING,
        device_time=(device_time("launched"), device_time("all", events=12_000, total_ns=690 * MS)),
        device_lines=lines,
    )
    return replace(facts, **changes)


NONE_FOUND = Diagnosis(findings=(), abstained=(Abstention("input.loader_bound", "the data wait of the steps"),))


@pytest.fixture
def report(folder: Path) -> Report:
    return build(foreign(folder), NONE_FOUND)


def test_what_the_rules_could_not_judge_is_not_called_healthy(folder: Path) -> None:
    nothing = Diagnosis(findings=(), abstained=tuple(Abstention(f"rule-{n}", "stacks") for n in range(len(RULES))))
    text = shown(build(foreign(folder), nothing))
    assert "Nothing worth" not in text
    assert "Not judged: rule-0, rule-1" in text
    assert "by the rules that could be judged." in words_of(shown(build(foreign(folder), NONE_FOUND)))


def test_hostile_names_do_nothing(folder: Path) -> None:
    bad = DeviceLines(
        "device",
        MS,
        (device_line(HOSTILE, 1, MS, top=((HOSTILE, MS),)),),
        {HOSTILE: MS},
        {HOSTILE: 1.0},
        1.0,
        0.0,
        None,
    )
    times = (device_time("launched", trace=HOSTILE), device_time("launched", trace="b"))
    facts = foreign(folder, device_lines=bad, device_time=times, traces=(trace_facts(trace=HOSTILE),))
    report = build(facts, NONE_FOUND)
    text = shown(report)
    assert "\x1b" not in text
    assert "\x9b" not in text
    assert "\u202e" not in text
    page = page_of(report, facts)
    assert "<script" not in page
    assert "\u202e" not in page
