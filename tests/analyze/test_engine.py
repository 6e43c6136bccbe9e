"""What all analyses stand on: sets of times, the user's lines behind slices, steps and how they are labelled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope import api
from stepscope.analyze import analyze
from stepscope.analyze.device.device_time import ENGINE, LIBRARIES
from stepscope.engine import intervals
from stepscope.engine.intervals import Intervals
from stepscope.model import PHASES, Analysis, DeviceLines, StepFacts
from stepscope.tables.arrays import Int64, positions
from tests.analyze.traces import BACK_THREAD, US, Slices, tables
from tests.builders import MS, T0, make_tables, step_rows
from tests.records import some
from tests.run_folders import make_run_folder

POINTS = 60

times = st.integers(0, POINTS)
pairs = st.lists(st.tuples(times, times), max_size=12)
window = st.tuples(times, times)


def arrays(found: list[tuple[int, int]]) -> tuple[Int64, Int64]:
    table = np.asarray(found, np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


def set_of(found: list[tuple[int, int]]) -> Intervals:
    return intervals.union(*arrays(found))


def points(found: list[tuple[int, int]]) -> set[int]:
    return {point for start, end in found for point in range(start, end)}


def points_of(found: Intervals) -> set[int]:
    """The points of a set, which must be in its normal form."""
    starts, ends = found.starts.tolist(), found.ends.tolist()
    assert all(start < end for start, end in zip(starts, ends, strict=True))
    assert all(end < start for end, start in zip(ends[:-1], starts[1:], strict=True))
    return points(list(zip(starts, ends, strict=True)))


@given(pairs, window)
def test_within_a_window(one: list[tuple[int, int]], limits: tuple[int, int]) -> None:
    start, end = limits
    inside = points(one) & set(range(start, end))
    assert points_of(intervals.clip(set_of(one), start, end)) == inside
    assert points_of(intervals.complement(set_of(one), start, end)) == set(range(start, end)) - inside


@given(st.lists(pairs, max_size=5), pairs)
def test_a_partition_is_exclusive_in_order_and_complete(
    sets: list[list[tuple[int, int]]], windows: list[tuple[int, int]]
) -> None:
    lengths = intervals.partition_lengths(*arrays(windows), [set_of(one) for one in sets])
    assert lengths.shape == (len(windows), len(sets) + 1)
    for row, (start, end) in zip(lengths.tolist(), windows, strict=True):
        left = set(range(start, end))
        for one, length in zip(sets, row, strict=False):
            assert length == len(points(one) & left)
            left -= points(one)
        assert row[-1] == len(left)
        assert sum(row) == max(end - start, 0)


FOREIGN: dict[str, Any] = {"run": {"user_roots": (), "hosts": ()}, "ranks": ()}
LIBRARY = "torch/utils/data/dataloader.py(1): __next__"


@settings(deadline=None)
@given(st.sets(st.integers(0, 12)), st.booleans(), st.lists(st.none() | st.integers(-3, 16)))
def test_positions_are_those_of_a_search(some: set[int], gaps: bool, wanted: list[int | None]) -> None:
    ids = sorted(some) if gaps else list(range(min(some, default=0), min(some, default=0) + len(some)))
    found = positions(pl.Series(ids, dtype=pl.Int64), pl.Series(wanted, dtype=pl.Int64))
    assert found.tolist() == [ids.index(each) if each in ids else -1 for each in wanted]


def reasons_of(*traces: Slices) -> DeviceLines:
    found = analyze(tables(*traces, **FOREIGN)).device_lines
    assert found is not None
    return found


def on_second_thread(*, framed: bool, backward: bool) -> Slices:
    """A kernel of an operator on a thread of its own, with a library's function or an operator of the backward pass."""
    trace = Slices(trace=f"{framed}-{backward}")
    trace.python(LIBRARY)
    trace.kernel(0, 4, below=trace.add("cpu_op", "aten::add"))
    if backward:
        trace.add("cpu_op", "AddBackward0", 10, sequence=9, forward_thread=BACK_THREAD)
    if framed:
        trace.python(LIBRARY)
    trace.add("cpu_op", "aten::add", 20)
    for row in trace.events[1:]:
        if row["category"] != "kernel":
            row["track"] = "1/2"
    return trace


def test_threads_of_the_engine_are_told_trace_by_trace() -> None:
    traces = [on_second_thread(framed=framed, backward=back) for framed in (False, True) for back in (False, True)]
    assert reasons_of(*traces).unattributed == {LIBRARIES: 12 * US, ENGINE: 4 * US}


@pytest.mark.parametrize(("steps_below", "file"), [(3, "trainers/loop.py"), (1, "train.py")])
def test_a_line_that_leads_to_a_librarys_training_is_no_place(steps_below: int, file: str) -> None:
    """`fit()` runs for several steps below the user's line: the place of its work is the library's.

    Where the user's own loop calls a library's module in every step, the place is the user's.
    """
    trace = Slices()
    main = trace.add("python_function", "train.py(9): main", 0, 100, step=None)
    starts = [10, 40, 70]
    for number, start in enumerate(starts):
        trace.add("cpu_op", "aten::zeros", start, step=number, parent=main)
    for start in starts[: len(starts) if steps_below == 1 else 1]:
        duration = 20 if steps_below == 1 else 90
        lib = trace.add(
            "python_function",
            "/usr/lib/python3/site-packages/trainers/loop.py(5): fit",
            start - 5,
            duration,
            parent=main,
        )
        trace.kernel(start, 4, below=trace.add("cpu_op", "aten::mm", start + 2, parent=lib, step=starts.index(start)))
    found = reasons_of(trace)
    assert [line.place.file for line in found.lines] == [file]


def train(**tables: Any) -> StepFacts:
    return analyze(make_tables(**tables)).steps[0]


def test_steps_are_left_out_by_reason() -> None:
    rows = step_rows(40, first_batch=False)
    for number in (0, 1):
        rows[number]["wall_ns"] = 90 * MS
    for number in (10, 11):
        rows[number]["in_window"] = True
    rows[20] |= {"first_batch": True, "wall_ns": 50 * MS}
    rows[25]["wall_ns"] = 70 * MS
    compiling = {"kind": "compile", "step": 30, "count": 1, "time_ns": T0}
    monitor = {"kind": "monitor", "step": 25, "measured": ["norms"], "time_ns": T0}
    facts = train(steps=rows, journal=[compiling, monitor])
    assert facts.excluded == {"warmup": 2, "window": 2, "first_batch": 1, "compile": 1, "monitor": 1}
    assert facts.mean_ms == pytest.approx(10)
    assert facts.first_batch_ms == pytest.approx(50)
    assert len(facts.series) == 40


@pytest.mark.parametrize(
    ("columns", "count"),
    [({"first_batch": True}, 1), ({"in_window": True}, 3), ({"first_batch": True, "in_window": True}, 3)],
)
def test_a_short_run_falls_back_and_says_so(columns: dict[str, Any], count: int) -> None:
    facts = train(steps=step_rows(count, **columns))
    assert facts.count == count
    assert facts.low_confidence


phase_ns = st.one_of(st.none(), st.integers(0, 10**10))


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.tuples(st.integers(1, 10**10), *(phase_ns for _ in PHASES)), min_size=1, max_size=8))
def test_the_partition_sums_to_the_mean_step(steps: list[tuple[int | None, ...]]) -> None:
    rows = [
        {"wall_ns": wall, **dict(zip((f"{phase}_ns" for phase in PHASES), phases, strict=True))}
        for wall, *phases in steps
    ]
    facts = train(steps=rows)
    assert sum(part.share for part in facts.partition) == pytest.approx(1)
    assert sum(part.ms for part in facts.partition) == pytest.approx(facts.mean_ms)
    assert all(0 <= part.share <= 1 + 1e-9 for part in facts.partition)
    assert len({part.category for part in facts.partition}) == len(facts.partition)


def test_fixed_costs() -> None:
    rows = step_rows(20, first_batch=False)
    rows[0]["wall_ns"] = 510 * MS
    window = {"kind": "window", "trace": "t.json", "stop_duration_ns": 200 * MS, "export_duration_ns": 300 * MS}
    fixed = analyze(make_tables(steps=rows, journal=[window])).fixed
    assert fixed.before_first_step_s == pytest.approx(1)
    assert fixed.first_step_s == pytest.approx(0.51)
    assert fixed.warmup_s == pytest.approx(0.5)
    assert fixed.windows_s == pytest.approx(0.5)
    assert fixed.total_s == pytest.approx(1 + 0.5 + 0.5)


STEPS, FIRST, ACTIVE, STOP_MS = 40, 10, 15, 2000
OPERATORS = 3  # of each step
TEN: dict[str, Any] = {"data_wait_ms": 1, "forward_ms": 3, "backward_ms": 4, "optimizer_ms": 1, "other_ms": 1}


def _own_profiler(tmp_path: Path) -> Analysis:
    """Steps of 10 ms; the script's profiler records `ACTIVE` of them whole and stops in the next one."""
    rows = [dict(row) for row in step_rows(STEPS, **TEN, fetches=0)]
    for row in rows[FIRST : FIRST + ACTIVE + 1]:
        row["in_window"] = True
    rows[FIRST + ACTIVE]["data_wait_ns"] = STOP_MS * MS
    for row in rows:
        row.pop("start_ns", None)
        row.pop("wall_ns", None)
    events = []
    for number in range(FIRST, FIRST + ACTIVE):
        start = (T0 + number * 10 * MS) / 1e3
        mark = {"ph": "X", "pid": 1, "tid": 1, "ts": start + 20, "dur": 9960, "name": f"ProfilerStep#{number}"}
        events.append({**mark, "cat": "user_annotation"})
        for at in range(OPERATORS):
            call = {"ph": "X", "pid": 1, "tid": 1, "ts": start + 1000 * (at + 1), "dur": 500, "cat": "cpu_op"}
            events.append({**call, "name": "aten::mm", "args": {}})
    trace = tmp_path / "own.pt.trace.json"
    trace.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": 0, "traceEvents": events}))
    told = {"kind": "user_trace", "path": str(trace), "step": FIRST + ACTIVE, "time_ns": T0 + 400 * MS}
    folder = make_run_folder(tmp_path, steps=rows, events=[told])
    return api.open_run(folder, options=api.ReadOptions(cache=False)).analysis


def test_figures_of_the_scripts_own_profiler_are_divided_by_the_steps_it_recorded_whole(tmp_path: Path) -> None:
    found = _own_profiler(tmp_path)
    (window,) = found.windows
    assert window.owner == "user"
    assert window.steps == ACTIVE
    assert found.profiled is not None
    assert found.profiled.steps == ACTIVE
    assert found.views is not None
    assert [(row.name, row.calls_per_step, row.host_total_ns_per_step) for row in found.views.operators] == [
        ("aten::mm", OPERATORS, OPERATORS * 500_000)
    ]


def test_the_step_in_which_it_stops_is_no_profiled_one_and_is_paid_once(tmp_path: Path) -> None:
    found = _own_profiler(tmp_path)
    (steps,) = found.steps
    assert steps.excluded == {"profiler": 1, "warmup": 1, "window": ACTIVE}
    assert steps.mean_ms == pytest.approx(10)
    assert found.windows[0].overhead_ratio == pytest.approx(1, rel=0.01)
    assert found.fixed.windows_s == pytest.approx(STOP_MS / 1e3, rel=0.01)
    assert found.profiled is not None
    assert found.profiled.mean_ms == pytest.approx(10, rel=0.01)


SCRIPT = """\
import torch


def widen(x, weight):
    return torch.relu(x @ weight)  # WIDEN


def loss_of(y):
    return (y * y).mean()  # LOSS


def train():
    weight = torch.full((256, 512), 0.01, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    for _ in range(30):
        x = torch.randn(128, 256)  # INPUT
        loss = loss_of(widen(x, weight))
        optimizer.zero_grad()
        loss.backward()  # BACKWARD
        optimizer.step()  # UPDATE


train()
"""


def line_of(mark: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if f"# {mark}" in line)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> DeviceLines:
    folder = tmp_path_factory.mktemp("own")
    (folder / "train.py").write_text(SCRIPT)
    line = [sys.executable, "-m", "stepscope", "run", "--out", "run", "--window", "skip_first=10,active=3", "--quiet"]
    done = subprocess.run(
        [*line, "--", sys.executable, "train.py"], cwd=folder, capture_output=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return some(api.open_run(folder / "run").analysis.device_lines)


@pytest.mark.process
@pytest.mark.torch
def test_nothing_is_lost(found: DeviceLines) -> None:
    assert found.basis == "cpu_op"
    assert found.steps is not None
    assert sum(line.ns for line in found.lines) + sum(found.unattributed.values()) == found.total_ns
    assert found.attributed_share is not None
    assert found.attributed_share > 0.9
    assert found.guessed_share == 0


@pytest.mark.process
@pytest.mark.torch
@pytest.mark.parametrize(
    ("mark", "ways"),
    [
        *(("WIDEN", {"direct", "sequence"}), ("LOSS", {"direct", "sequence"})),
        *(("INPUT", {"direct"}), ("UPDATE", {"direct"})),  # what needs no gradient has one direction
    ],
)
def test_a_line_is_charged_in_both_directions(found: DeviceLines, mark: str, ways: set[str]) -> None:
    (line,) = [line for line in found.lines if line.exact_line and line.place.line == line_of(mark)]
    assert Path(line.place.file).name == "train.py"
    assert {way for way, ns in line.via.items() if ns > 0} == ways


@pytest.mark.process
@pytest.mark.torch
def test_the_call_of_backward_keeps_only_what_no_operator_explains(found: DeviceLines) -> None:
    backward = sum(ns for line in found.lines for way, ns in line.via.items() if way == "sequence")
    own = sum(line.ns for line in found.lines if line.place.line == line_of("BACKWARD"))
    assert own < 0.2 * backward
