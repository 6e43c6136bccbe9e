"""Processes that the script started: who they are, what the main thread waits for them, and which line is named."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import Finding
from stepscope.model.machine import ChildrenFacts
from stepscope.tables.schema import Tables
from tests.analyze.scenes import TRAIN
from tests.analyze.test_machine import SECOND
from tests.analyze.test_pool import pool_tables
from tests.builders import MS, PID, T0, make_tables
from tests.records import replace

RULE = "system.children_hold_cores"
BURN = "python burn.py 600"


def process(pid: int, **more: Any) -> dict[str, Any]:
    start = T0 - 200 * MS
    return {"pid": pid, "ppid": PID, "role": "other", "command": BURN, "start_ns": start, **more}


def used(pids: list[int], cores: float) -> list[dict[str, Any]]:
    return [
        {"metric": "cpu_pct", "time_ns": T0 + second * SECOND, "value": 100 * cores, "pid": pid}
        for second in range(40)
        for pid in pids
    ]


def started(pid: int | None, line: int, **more: Any) -> dict[str, Any]:
    place = {"file": TRAIN, "line": line, "function": "main"}
    row = {"kind": "child", "time_ns": T0 - 210 * MS, "pid": pid, "how": "subprocess.Popen", "command": BURN}
    return {**row, **place, **more}


def tables(processes: list[dict[str, Any]], cores: float, journal: list[dict[str, Any]], **more: Any) -> Tables:
    """A main thread that has a core for a quarter of the time and waits for one in 60 %."""
    values: dict[str, Any] = {"main": 0.25, "delay": 0.6, "pool": 0.25, "pool_delay": 0.0, "threads": 2, **more}
    rank = {"pid": PID, "ppid": 1, "role": "rank", "command": "python train.py", "start_ns": T0 - SECOND}
    made = pool_tables(**values, processes=[rank, *processes], journal=journal)
    beside = make_tables(system=used([row["pid"] for row in processes], cores / max(1, len(processes)))).system
    return replace(made, system=pl.concat([made.system, beside]))


def children(of: Tables) -> ChildrenFacts:
    machine = analyze(of).machine
    assert machine.children is not None
    return machine.children


def found(of: Tables) -> Finding | None:
    return next((one for one in diagnose(analyze(of)).findings if one.rule == RULE), None)


def test_processes_of_the_script_that_hold_the_cores_are_named() -> None:
    three = [process(pid) for pid in (51, 52, 53)]
    finding = found(tables(three, 1.5, [started(pid, 7) for pid in (51, 52, 53)]))
    assert finding is not None
    assert finding.title.startswith(
        f"3 processes that the script started ({BURN}, train.py:7) hold 1.5 of 2 cores: the main thread waits for one"
    )
    assert [(place.line, place.share) for place in finding.where] == [(7, pytest.approx(1))]
    assert finding.share == pytest.approx(0.6 * 1.5 / 1.75)  # the rest is for the process's own other thread
    assert finding.gain_ceiling >= 0.6
    assert finding.confidence == "medium"


def test_without_them_or_where_they_sleep_the_rule_keeps_quiet() -> None:
    assert found(tables([], 0.0, [])) is None
    assert found(tables([process(51)], 0.02, [started(51, 7)])) is None
    assert found(tables([process(51)], 1.5, [started(51, 7)], delay=0.02)) is None


def test_ranks_workers_and_helpers_are_nobodys_children() -> None:
    others = [process(50 + number, role=role) for number, role in enumerate(("loader_worker", "helper", "launcher"))]
    assert children(tables(others, 1.5, [started(50, 7)])).groups == ()


def test_a_fork_and_a_shell_that_is_gone_are_known_by_their_time() -> None:
    fork = started(None, 11, how="os.fork", command=None)
    (child,) = children(tables([process(51, command="python train.py")], 1.0, [fork])).groups
    assert (child.how, child.place and child.place.line) == ("os.fork", 11)
    gone = [process(52, ppid=1)]  # its shell lived for a moment
    (child,) = children(tables(gone, 1.0, [started(99, 12, command="burn &")])).groups
    assert child.place is not None
    assert child.place.line == 12
    (late,) = children(tables(gone, 1.0, [started(99, 12, time_ns=T0 - 20 * SECOND)])).groups
    assert (late.how, late.place) == (None, None)


def test_a_process_of_python_is_named_by_what_it_runs() -> None:
    pool = {"how": "multiprocessing.Process", "command": "squares"}
    rows = [process(pid, command="python train.py") for pid in (51, 52)]
    (child,) = children(tables(rows, 1.0, [started(pid, 5, **pool) for pid in (51, 52)])).groups
    assert (child.command, child.processes) == ("Process(squares)", 2)
    assert child.cores == pytest.approx(1.0)
