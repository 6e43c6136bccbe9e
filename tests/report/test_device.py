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
from stepscope.report import build
from tests.dashboard.plain_pages import page_of
from tests.records import replace
from tests.report.fabricate import ITEM_LINE, LOOP_LINE, analysis, run_facts, write_script
from tests.report.test_terminal import HOSTILE, shown, words_of

MS = 1_000_000
TRACE = "worker0.pt.trace.json"
READING = ReadingFacts(
    traces=2,
    events=149_021,
    salvaged=12,
    lost=3,
    clipped=66,
    repaired=1,
    device_events=9_000,
    link_rate=0.994,
    linked_shares={"correlation": 0.99, "flow": 0.004},
    graph_share=0.0,
    unlinked_share=0.006,
    before_recording_share=0.301,
)


def trace_facts(**changes: Any) -> TraceFacts:
    facts = TraceFacts(
        trace=TRACE,
        rank=0,
        owner="user",
        events=149_021,
        salvaged=12,
        lost=3,
        unsupported=40,
        clipped=66,
        repaired=1,
        problems=("the file ends in the middle of an event",),
        device_events=9_000,
        device_ns=500 * MS,
        linked_ns={"correlation": 347 * MS},
        before_recording_ns=150 * MS,
        graph_ns=0,
        unlinked_ns=3 * MS,
        link_rate=0.994,
    )
    return replace(facts, **changes)


def device_time(scope: str, **changes: Any) -> DeviceTime:
    facts = DeviceTime(
        rank=0,
        trace=TRACE,
        scope=scope,
        total_ns=480 * MS,
        busy_ns=472 * MS,
        compute_ns=400 * MS,
        communication_ns=90 * MS,
        memcpy_ns=12 * MS,
        exposed_communication_ns=65 * MS,
        exposed_memcpy_ns=7 * MS,
        idle_ns=8 * MS,
        busy_share=472 / 480,
        events=9_000,
        kind_ns={"kernel": 490 * MS},
    )
    return replace(facts, **changes)


def device_line(file: str, line: int, ns: int, **changes: Any) -> DeviceLine:
    facts = DeviceLine(
        place=Place(file, line, "main"),
        ns=ns,
        share=ns / (500 * MS),
        ms_per_step=ns / MS / 10,
        events=40,
        via={"sequence": ns},
        top=(("gemm_kernel", ns),),
        exact_line=True,
        guess=False,
    )
    return replace(facts, **changes)


def foreign(folder: Path, **changes: Any) -> Analysis:
    """What is known of a trace that something else recorded: no stacks, no journal, no command."""
    file = str(folder / "train.py")
    lines = DeviceLines(
        basis="device",
        total_ns=500 * MS,
        lines=(
            device_line(file, LOOP_LINE, 300 * MS),
            device_line(file, ITEM_LINE, 40 * MS, via={"direct": 40 * MS}, exact_line=False),
        ),
        unattributed={"launched before the recording began": 150 * MS, "only library code around the launch": 10 * MS},
        unattributed_shares={"launched before the recording began": 0.3, "only library code around the launch": 0.02},
        attributed_share=0.68,
        guessed_share=0.0,
        steps=10,
    )
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
def folder(tmp_path: Path) -> Path:
    write_script(tmp_path)
    return tmp_path


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
