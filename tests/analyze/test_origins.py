"""Row numbers of slices and their origins: the quick ways agree with the plain ones."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.analyze.device.device_time import ENGINE, LIBRARIES
from stepscope.model import DeviceLines
from stepscope.tables.arrays import positions
from tests.analyze.traces import BACK_THREAD, US, Slices, tables

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
