"""The sampled views on the terminal: what is shown, what is left out, and that no name can do harm."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from stepscope.analyze.input import loader_waits
from stepscope.model import Place, Report
from stepscope.model.sampled import (
    LoaderWait,
    RankLine,
    RankLines,
    SampledViews,
    SlowLine,
    SlowSteps,
    StageTime,
    WaitPart,
)
from stepscope.report import build, terminal, words
from stepscope.report.values import plain_mapping
from tests.records import replace
from tests.report.fabricate import analysis, diagnosis

ROOT = "/home/user/project"
HOSTILE = "evil\x1b[2J\x1b]0;t\x07[bold red]b[/]\u202e\r\nfake"
AUGMENT = Place(f"{ROOT}/data.py", 20, "augment")
PARTS = (
    WaitPart("worker_busy", AUGMENT, 24.0, 0.6, 60, lines=1),
    WaitPart("transfer", None, 8.0, 0.2, 20),
    WaitPart("worker_busy", None, 4.8, 0.12, 12, lines=7),
    WaitPart("worker_busy", None, 2.4, 0.06, 6, leaf="PIL/Image.py:open"),
    WaitPart("pinning", None, 0.8, 0.02, 2),
)
WAIT = LoaderWait(0, "rank-0", 40.0, 0.65, True, PARTS, "stacks", 100, 154, True)
SLOW = SlowSteps(
    slow_steps=12,
    typical_steps=480,
    threshold_ms=90.0,
    median_ms=60.0,
    slow_mean_ms=143.0,
    typical_mean_ms=61.0,
    lines=(SlowLine(Place(f"{ROOT}/train.py", 44, "save"), "other", 80.0, 0.1, 79.9, True, 96, "torch/x.py:save"),),
    source="stacks",
)
RANKS = RankLines(
    unit="share of samples",
    ranks=(0, 1),
    lines=(RankLine(Place(f"{ROOT}/train.py", 9, "main"), "other", {0: 0.0, 1: 0.44}, 0.44, 1, False, None),),
    straggler=1,
    straggler_place=Place(f"{ROOT}/train.py", 9, "main"),
    waiters=(0,),
    waiter_place=Place(f"{ROOT}/train.py", 10, "main"),
    verdict="rank 1 spends 44 % of its loop at train.py:9; rank 0 waits for it",
    source="stacks",
)
VIEWS = SampledViews(
    stages=(StageTime("import", 400, 0.4, None), StageTime("steady", 600, 0.6, 0.3)),
    phases={"data_wait": 0.65, "backward": 0.345, "other": 0.005},
    waits=(WAIT,),
    slow_steps=SLOW,
    rank_lines=RANKS,
    absent={},
)
EMPTY = SampledViews(stages=(), phases={}, waits=(), slow_steps=None, rank_lines=None, absent={"waits": "none"})


def shown(views: SampledViews | None, *, width: int = 100) -> str:
    """What the terminal shows of them, between the headline and what comes next."""
    report = Report(
        run={"cwd": ROOT, "user_roots": [ROOT]},
        quality={},
        steps=None,
        findings=(),
        abstained=(),
        ignored=(),
        views={"sampled": views and plain_mapping(views)},
    )
    return "".join(f"{part}\n" for part in printed(report, width).split("\n\n")[1:-1])


def printed(report: Report, width: int = 100) -> str:
    stream = io.StringIO()
    terminal.render(report, Console(file=stream, width=width, color_system=None))
    return stream.getvalue()


def test_everything_there_is_in_a_few_lines() -> None:
    assert shown(VIEWS).splitlines() == [
        "In the loader: 65 % of the loop, 40.0 ms a step (100 samples)",
        "   60 %  a worker makes batches at data.py:20  augment",
        "   20 %  a batch moves between processes",
        "   12 %  a worker makes batches at 7 more lines",
        "    6 %  a worker makes batches in PIL/Image.py:open",
        "Slow steps: 12 above 90.0 ms take 143 ms, 480 typical ones 61.0 ms",
        "  +79.9 ms  train.py:44  save, other, in slow steps only",
        "Where ranks differ: rank 1 spends 44 % of its loop at train.py:9; rank 0 waits for it",
        "  train.py:9  main, other: 44 % on rank 1, down to 0 %",
        "Sampled in the main process: imports 40 %, steady steps 60 %",
        "Sampled in the loop, by what stands on the stack: data wait 65 %, backward 34 %",
    ]


def test_nothing_to_say_is_nothing() -> None:
    assert shown(None) == ""
    assert shown(EMPTY) == ""
    assert shown(replace(EMPTY, waits=(replace(WAIT, wait_share=0.02),))) == ""  # no wait worth a line
    calm = replace(
        RANKS, lines=(), straggler=None, straggler_place=None, waiters=(), verdict="no line tells them apart"
    )
    assert shown(replace(EMPTY, rank_lines=calm)) == ""


def test_waiting_that_was_not_sampled_is_said_instead_of_figures() -> None:
    views = replace(EMPTY, waits=(replace(WAIT, idle_sampled=False, wait_share=0.04),))
    assert "waiting threads were not sampled" in shown(views)
    assert "%" not in shown(views)


def test_samples_without_times_say_what_they_stand_for() -> None:
    views = replace(EMPTY, waits=(replace(WAIT, simultaneous=False, wait_ms_per_step=None),))
    text = shown(views)
    assert text.startswith("In the loader: 65 % of the loop (100 samples)\n")
    assert "what workers did in the whole period stands for what they did during waits" in text


def test_of_many_ranks_the_longest_waits_are_shown() -> None:
    waits = tuple(replace(WAIT, rank=rank, wait_share=0.1 + rank / 100) for rank in range(20))
    text = shown(replace(EMPTY, waits=waits))
    assert "29 % of rank 19's loop" in text
    assert "28 % of rank 18's loop" in text
    assert "rank 17" not in text
    assert "18 more ranks wait for their loaders" in text


def test_milliseconds_and_waiting_of_ranks() -> None:
    line = replace(RANKS.lines[0], by_rank={0: 12.5, 1: 0.25}, most=0, waiting=True)
    text = shown(replace(EMPTY, rank_lines=replace(RANKS, unit="ms per step", lines=(line,))))
    assert "main, other, waiting: 12.5 ms on rank 0, down to 0.25 ms" in text


def test_slow_steps_without_a_line() -> None:
    assert "no single line makes them slow" in shown(replace(EMPTY, slow_steps=replace(SLOW, lines=())))


@pytest.mark.parametrize("width", [30, 80])
def test_names_can_do_no_harm(width: int) -> None:
    place = Place(HOSTILE, 3, HOSTILE)
    wait = replace(WAIT, parts=(replace(PARTS[0], place=place), replace(PARTS[3], leaf=HOSTILE)))
    text = shown(
        SampledViews(
            stages=(StageTime(HOSTILE, 4, 0.4, None), StageTime("steady", 6, 0.6, None)),
            phases={HOSTILE: 1.0},
            waits=(wait,),
            slow_steps=replace(SLOW, lines=(replace(SLOW.lines[0], place=place, phase=HOSTILE),)),
            rank_lines=replace(RANKS, lines=(replace(RANKS.lines[0], place=place, phase=HOSTILE),), verdict=HOSTILE),
            absent={},
        ),
        width=width,
    )
    assert not set(text) & {"\x1b", "\x07", "\u202e", "\r"}
    assert "\nfake" not in text
    assert "[bold red]" in text or width < 80  # shown as it is, not obeyed
    assert max(map(len, text.splitlines())) <= width


def test_every_kind_of_part_has_words() -> None:
    assert set(loader_waits.KINDS.values()) == set(words.WAIT_PARTS)


def test_what_is_said_elsewhere_is_not_said_again(tmp_path: Path) -> None:
    own = replace(WAIT.parts[0], kind="loading_here", share=1.0)
    alone = replace(EMPTY, waits=(replace(WAIT, parts=(own,), simultaneous=False),), phases={"forward": 0.7})
    assert "the main process loads itself" in shown(alone)
    assert "what workers did" not in shown(alone)
    assert "forward 70 %" in shown(alone)
    told = [
        printed(build(analysis(tmp_path, sampled=replace(alone, waits=waits)), diagnosis(tmp_path)))
        for waits in (alone.waits, (WAIT,))
    ]
    assert "the main process loads itself" not in told[0]
    assert "forward 70 %" not in told[0]
    assert "a worker makes batches" in told[1]
