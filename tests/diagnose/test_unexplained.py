"""Silence is earned: "nothing worth fixing" is said where little was left unexplained, and on every surface alike."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.diagnose.weigh import SILENCE
from stepscope.model import Report, Unexplained
from stepscope.report import sentences
from stepscope.report.document import build
from stepscope.tables.schema import Tables
from tests.analyze.scenes import TORCH, TRAIN, stack
from tests.analyze.test_pool import pool_tables
from tests.builders import MS, T0, make_tables, step_rows
from tests.diagnose.test_children import process, started
from tests.diagnose.test_children import tables as with_children
from tests.records import replace

EVENT = {"kind": "exit", "reason": "atexit"}  # of a run that the agent recorded


def busy(**more: Any) -> Tables:
    """A healthy run: the main thread has a core nearly all the time, and its samples stand in operators."""
    values: dict[str, Any] = {"main": 0.97, "delay": 0.02, "pool": 0.9, "pool_delay": 0.0, "threads": 2, **more}
    times = {"start_ns": T0, "end_ns": T0 + 40_000 * MS}
    stacks = [stack([f"<module> ({TRAIN}:9)", f"relu ({TORCH}/nn/functional.py:1)"], 800, **times)]
    return pool_tables(**{"journal": [EVENT], "stacks": stacks, **values})


def of(tables: Tables) -> Unexplained:
    found = diagnose(analyze(tables)).unexplained
    assert found is not None
    assert found.share == pytest.approx(min(1.0, sum(part.share for part in found.parts)))
    assert found.large == (found.share >= SILENCE.unexplained)
    return found


def report(tables: Tables) -> Report:
    analysis = analyze(tables)
    return build(analysis, replace(diagnose(analysis), findings=(), abstained=()))


def test_a_healthy_run_may_be_called_so() -> None:
    assert (of(busy()).large, of(busy()).unseen) == (False, ())
    assert (sentences.healthy(report(busy())) or "").startswith("Nothing worth fixing above 5")


@pytest.mark.parametrize(
    ("run", "what", "share"),
    [
        ({"main": 0.35, "delay": 0.6, "pool": 0.3}, "ready to run, without a core", 0.6),  # no finding tells who had it
        ({"main": 0.4, "delay": 0.0, "pool": 0.1}, "asleep", 0.6 - 0.1),  # for a tenth another thread computed
        # a thread of the script holds the interpreter's lock: torch has no work for the main one in another
        ({"main": 0.3, "delay": 0.0, "pool": 0.7, "threads": 1}, "asleep", 0.7),
        ({"main": 0.3, "delay": 0.0, "pool": 0.7, "threads": 2}, "asleep", 0.7 - 0.3),
    ],
)
def test_waiting_that_nobody_explains(run: dict[str, Any], what: str, share: float) -> None:
    found = of(busy(**run))
    assert found.large
    assert found.parts[0].what.startswith(what)
    assert found.parts[0].share == pytest.approx(share)
    assert f"other threads of the process used {run['pool']:.1f}" in found.parts[0].what
    assert sentences.healthy(report(busy(**run))) is None


def test_what_a_finding_tells_is_explained() -> None:
    waiting = {"main": 0.25, "delay": 0.6, "pool": 0.25}
    with_finding = with_children([process(51)], 1.5, [EVENT, started(51, 7)])
    left = next(part.share for part in of(with_finding).parts if part.what.startswith("ready"))
    assert left == pytest.approx(of(busy(**waiting)).parts[0].share - 0.6 * 1.5 / 1.75)


def test_sleep_while_the_main_thread_loads_is_told_with_the_loading() -> None:
    steps = step_rows(400, data_wait_ms=80, forward_ms=20, backward_ms=0, optimizer_ms=0, other_ms=0)
    loader = {"kind": "loader", "id": 1, "epoch": 0, "num_workers": 0, "batch_size": 8, "time_ns": T0}
    asleep = busy(main=0.2, delay=0.0, pool=0.0, steps=steps, journal=[EVENT, loader])
    assert [one.rule for one in diagnose(analyze(asleep)).findings] == ["input.loader_bound"]
    found = of(asleep)
    assert found.parts[0].what.startswith("asleep")
    assert found.parts[0].share == pytest.approx(0.2)  # at most what lies outside of the loading
    unfed = busy(main=0.2, delay=0.0, pool=0.0, journal=[EVENT])
    assert of(unfed).parts[0].share == pytest.approx(0.8)


def test_sleep_for_the_other_threads_of_an_operator_is_explained() -> None:
    assert not of(busy(main=0.5, delay=0.0, pool=0.5)).large


def test_without_telemetry_silence_is_no_verdict() -> None:
    tables = make_tables(steps=step_rows(60, other_ms=0.1), journal=[EVENT])
    assert not of(tables).large
    assert "whether the main thread had a core" in of(tables).unseen[0]
    said = sentences.unexplained(report(tables)) or ""
    assert said.startswith("No loss above 5")
    assert "not all could be seen" in said
    assert sentences.healthy(report(tables)) is None


def test_without_stacks_and_windows_what_lies_outside_the_passes_is_unexplained() -> None:
    rows = step_rows(60, forward_ms=1, other_ms=20)
    found = of(make_tables(steps=rows, journal=[EVENT]))
    assert found.large
    assert "outside the passes" in found.parts[0].what


def test_beside_findings_a_large_share_is_said_and_what_was_not_seen_is_left_to_not_judged() -> None:
    rows = ({"cost_ms_per_step": 1.0},)
    large = replace(report(busy(main=0.35, delay=0.6, pool=0.3)), findings=rows)
    assert (sentences.unexplained(large) or "").startswith("Nobody explained")
    unseen = replace(report(make_tables(steps=step_rows(60, other_ms=0.1), journal=[EVENT])), findings=rows)
    assert sentences.unexplained(unseen) is None
