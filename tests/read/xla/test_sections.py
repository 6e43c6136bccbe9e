"""Logs of XLA_METRICS_FILE: what each step did, from totals that only grow, or were cleared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.read.xla.files import read_xla_files
from tests.read.xla.texts import SCALAR, counts, events, read, recorded, report, section, total_ns


def log(*steps: tuple[int, int], first_step: int = 0, marks: int = 0) -> str:
    """A log; of each step, the totals of compilations and transfers."""
    return "".join(
        section(first_step + at, report(marks + at + 1, compiles, transfers, {SCALAR: transfers}))
        for at, (compiles, transfers) in enumerate(steps)
    )


def test_totals_become_what_each_step_did(tmp_path: Path) -> None:
    run = read(tmp_path, metrics__txt=log((2, 1), (3, 3), (3, 5), (5, 5)))
    assert counts(run, "compile", "step") == {0: 2, 1: 1, 3: 2}
    assert counts(run, "transfer", "step") == {0: 1, 1: 2, 2: 2}
    assert {event["step_source"] for event in events(run, "compile")} == {"file"}
    assert [event["duration_ns"] for event in events(run, "compile")] == [2 * 10**8, 10**8, 2 * 10**8]
    (standing,) = events(run, "counters")
    assert (standing["step"], standing["counters"]["MarkStep"]) == (3, 4)


def test_totals_that_were_cleared_count_anew(tmp_path: Path) -> None:
    run = read(tmp_path, metrics__txt=log((5, 0), (6, 8), marks=0) + log((0, 0), (1, 2), first_step=2))
    assert counts(run, "compile", "step") == {0: 5, 1: 1, 3: 1}
    assert counts(run, "transfer", "step") == {1: 8, 3: 2}
    whole = events(run, "counters")[0]["metrics"]
    assert (whole["CompileTime"]["samples"], whole["CompileTime"]["total"]) == (7, 7e8)


def test_operators_without_lowering_have_their_steps(tmp_path: Path) -> None:
    text = "".join(section(at, report(at + 1, 0, at, {"aten::median": at})) for at in range(3))
    run = read(tmp_path, metrics__txt=text)
    assert counts(run, "fallback", "step") == {1: 1, 2: 1}
    assert {event["operator"] for event in events(run, "fallback")} == {"aten::median"}
    assert {event["operator"] for event in events(run, "transfer")} == {None}


def test_a_report_after_the_last_step_adds_what_the_log_lacks(tmp_path: Path) -> None:
    run = read(tmp_path, metrics__txt=log((2, 1), (3, 3)), end__txt=report(2, 3, 4, {SCALAR: 4}))
    assert counts(run, "transfer", "step") == {0: 1, 1: 2, None: 1}
    assert counts(run, "compile", "step") == {0: 2, 1: 1}


def test_a_log_of_several_runs_is_read_as_its_last(tmp_path: Path) -> None:
    run = read(tmp_path, metrics__txt=log((9, 9), (9, 9), (9, 9)) + log((1, 0), (2, 0)))
    assert counts(run, "compile", "step") == {0: 1, 1: 1}
    assert run.losses.counts["earlier_runs"] == 1


def test_the_ordinal_of_a_file_is_its_rank(tmp_path: Path) -> None:
    run = read(tmp_path, metrics__txt__0=log((1, 0)), metrics__txt__1=log((4, 0)), metrics__txt__10=log((7, 0)))
    assert [(rank.name, rank.rank) for rank in run.ranks] == [("rank-0", 0), ("rank-1", 1), ("rank-10", 10)]
    assert [events(run, "compile", at)[0]["count"] for at in range(3)] == [1, 4, 7]


def test_a_cut_section_loses_what_it_lacks_and_no_more(tmp_path: Path) -> None:
    text = log((2, 1), (3, 3), (9, 9))
    run = read(tmp_path, metrics__txt=text[: text.rindex("Metric: CompileTime")])
    assert counts(run, "compile", "step") == {0: 2, 1: 1}
    assert events(run, "counters")[0]["metrics"]["CompileTime"]["samples"] == 3


@pytest.mark.parametrize("name", ["good", "bad", "item", "fallback"])
def test_recorded_steps_are_those_that_were_polled(name: str) -> None:
    polled = json.loads(recorded(f"{name}.steps.json").read_text())
    run = read_xla_files([recorded(f"{name}.metricsfile.txt")])
    compiled = counts(run, "compile", "step")
    lengths = {event["step"]: event["duration_ns"] for event in events(run, "compile")}
    before = before_ns = 0
    for row in polled:
        now = row["metrics"]["CompileTime"]
        assert compiled.get(row["step"], 0) == now["total"] - before
        assert lengths.get(row["step"], 0) == round(now["acc_ns"]) - before_ns
        before, before_ns = now["total"], round(now["acc_ns"])
    # The log is written inside the sync; what the script reads after the last one is in no section.
    last = polled[-1]["metrics"]["TransferFromDeviceTime"] or {"total": 0}
    transfers = sum(counts(run, "transfer", "step").values())
    assert transfers == last["total"] - (1 if name == "bad" else 0)
    assert total_ns(events(run, "transfer")) <= last.get("acc_ns", 0)
    assert set(counts(run, "fallback", "operator")) == set(polled[-1]["fallback"]) - {SCALAR}
