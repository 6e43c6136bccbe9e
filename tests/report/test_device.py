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
from stepscope.report.document import read_report, report_bytes
from tests.dashboard.plain_pages import page_of
from tests.records import replace
from tests.report.fabricate import ITEM_LINE, LOOP_LINE, analysis, diagnosis, run_facts, write_script
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


def test_quality_comes_before_any_figure(report: Report) -> None:
    flat = words_of(shown(report))
    assert flat.startswith(
        "Read 2 traces, 149,021 events: 3 lost, 12 salvaged, 66 overlaps cut, 1 durations repaired "
        "Device time linked to operators: 99 % (correlation 99 %, flow 0.4 %, no link 0.6 %); "
        "30 % of all was launched before the recording pictures: 512 of 521 train steps are steady"
    )


def test_device_time_and_its_lines_fit_a_screen(report: Report) -> None:
    text = shown(report)
    lines, flat = text.splitlines(), words_of(text)

    assert len(lines) <= 40
    assert max(map(len, lines[:-3])) <= 80
    assert "Device time span compute + comm. + copies idle busy" in flat
    assert "rank 0 480 ms 400 ms 65.0 ms 7.0 ms 8.0 ms 98 %" in flat
    assert "rank 0 with earlier launches 690 ms" in flat
    assert "Lines by the device time they cause 60 % train.py:14 main 30.0 ms a step, mostly its backward" in flat
    assert "│ total = total + cross_entropy" in flat
    assert "8 % train.py:7 main 4.0 ms a step" in flat
    assert "30 % launched before the recording began" in flat
    assert "a line is where its function begins; --source-root DIR finds the call in it" in flat
    order = [flat.index(part) for part in ("Read 2", "61.3 ms", "Device time span", "Lines by", "Nothing worth")]
    assert order == sorted(order)


def test_a_second_scope_that_says_the_same_is_not_shown(folder: Path) -> None:
    same = (device_time("launched"), device_time("all"))
    assert "with earlier launches" not in shown(build(foreign(folder, device_time=same), NONE_FOUND))


def test_why_there_is_no_line_is_said(folder: Path) -> None:
    none = DeviceLines("device", MS, (), {"no stacks": MS}, {"no stacks": 1.0}, 0.0, 0.0, 5)
    facts = foreign(folder, device_lines=none)
    report = build(facts, NONE_FOUND)
    assert "no line could be found: 100 % no stacks" in words_of(shown(report))
    assert "No line could be found. 100 % no stacks" in page_of(report, facts)


def test_library_code_is_marked_as_a_guess(folder: Path) -> None:
    guess = device_line("transformers/a.py", 3, MS, guess=True)
    lines = DeviceLines("device", MS, (guess,), {}, {}, 1.0, 1.0, None)
    text = words_of(shown(build(foreign(folder, device_lines=lines), NONE_FOUND), width=100))
    assert "transformers/a.py:3 main 0.10 ms a step, mostly its backward, library code" in text
    assert "so this is a guess" in text


def test_several_traces_are_named(folder: Path) -> None:
    times = tuple(device_time("launched", trace=f"span-{number}") for number in range(6))
    text = words_of(shown(build(foreign(folder, device_time=times), NONE_FOUND)))
    assert "rank 0 span-3 480 ms" in text
    assert "span-4" not in text
    assert "2 more rows" in text


def test_what_the_rules_could_not_judge_is_not_called_healthy(folder: Path) -> None:
    nothing = Diagnosis(findings=(), abstained=tuple(Abstention(f"rule-{n}", "stacks") for n in range(len(RULES))))
    text = shown(build(foreign(folder), nothing))
    assert "Nothing worth" not in text
    assert "Not judged: rule-0, rule-1" in text
    assert "by the rules that could be judged." in words_of(shown(build(foreign(folder), NONE_FOUND)))


def test_host_lines_are_shown_where_no_stacks_were_sampled(folder: Path) -> None:
    file = str(folder / "train.py")
    lines = DeviceLines("cpu_op", 9 * MS, (device_line(file, LOOP_LINE, 9 * MS),), {}, {}, 1.0, 0.0, None)
    none = replace(READING, device_events=0, link_rate=None, linked_shares={}, before_recording_share=None)
    facts = foreign(folder, device_time=(), device_lines=lines, reading=none)
    text = words_of(shown(build(facts, NONE_FOUND)))
    assert "No work of a device in it: times are the host's" in text
    assert "Lines by the time of the operators they call" in text
    sampled = replace(facts, stacks=analysis(folder).stacks)
    assert "Lines by the time of the operators" not in shown(build(sampled, NONE_FOUND))


def test_a_recording_of_ours_on_a_cpu_says_nothing_of_its_traces(folder: Path) -> None:
    none = replace(READING, device_events=0, lost=0, repaired=0, link_rate=None)
    text = shown(build(analysis(folder, reading=none), diagnosis(folder)))
    assert text.startswith("pictures: 512")


def test_the_command_that_was_used_is_offered_again(report: Report) -> None:
    import io

    from rich.console import Console

    from stepscope.report import terminal

    stream = io.StringIO()
    terminal.render(report, Console(file=stream, width=80), again="stepscope analyze a.json --html report.html")
    assert "stepscope analyze a.json --html report.html" in stream.getvalue()


def test_json_states_quality_first_and_survives_a_round_trip(report: Report) -> None:
    data = report_bytes(report)
    assert read_report(data) == report
    text = data.decode()
    assert text.index('"quality"') < text.index('"steps"') < text.index('"views"')
    assert report.quality["reading"]["link_rate"] == 0.994
    assert report.quality["traces"][0]["linked_ns"] == {"correlation": 347 * MS}
    assert report.views["device_time"][0]["exposed_communication_ns"] == 65 * MS
    assert report.views["device_lines"]["lines"][0]["place"]["line"] == LOOP_LINE
    assert report.views["device_lines"]["lines"][0]["code"].startswith("total = total")


def test_the_page_holds_both_tables(report: Report, folder: Path) -> None:
    page = page_of(report, foreign(folder))
    assert page.index("Read 2 traces") < page.index("Device time by kind</h3>")
    for part in ("gemm_kernel 300 ms", "train.py:14", "mostly its backward", "launched before the recording began"):
        assert part in page
    assert "the file ends in the middle of an event" in page


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
