"""What is told of one slice of the timeline, and how slices are found by name."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze.pictures.timeline import Timeline
from stepscope.analyze.pictures.timeline_queries import detail, search, viewport
from stepscope.errors import UsageError
from stepscope.model.timeline import SliceDetail
from tests.analyze.timelines import PROJECT, SOURCE, US, a_step, drawn, of_rows, of_traces
from tests.analyze.traces import Slices
from tests.builders import MS, T0


def named(made: Timeline, name: str) -> SliceDetail:
    """The detail of the first slice of that name."""
    shown = drawn(viewport(made, 0, made.length_ns, 1_000))
    return detail(made, next(each.id for each in shown if each.name == name))


def facts(found: SliceDetail) -> dict[str, Any]:
    return {fact.label: fact.value for fact in found.facts}


def test_a_kernel_tells_its_operator_its_line_and_its_stack() -> None:
    found = named(of_traces(a_step()), "gemm_f16")

    assert found.operator is not None
    assert (found.operator.name, found.start_ns, found.duration_ns) == ("aten::matmul", 500 * US, 200 * US)
    assert found.place is not None
    assert (found.place.place.file, found.place.place.line) == (f"{PROJECT}/train.py", 8)
    assert found.place.code == SOURCE.splitlines()[7].strip()
    assert [frame.place.function for frame in found.stack] == ["forward", "main"]
    told = facts(found)
    assert (told["launched by"], told["from launch to start"]) == ("cudaLaunchKernel", 300 * US)
    assert (told["blocks in the grid"], told["threads per block"], told["stream"]) == (64, 256, 7)


def test_a_device_slice_without_a_launch_says_why() -> None:
    trace = Slices()
    trace.kernel(0, 10, "early")
    found = named(of_traces(trace), "early")
    assert (found.operator, found.place, found.stack) == (None, None, ())
    assert any("before the recording" in note for note in found.notes)


def test_a_copy_tells_how_fast_it_was() -> None:
    told = facts(named(of_traces(a_step()), "Memcpy HtoD"))
    assert told["bytes per second"] == 4_000 / 50e-6


def test_a_sample_tells_its_stack() -> None:
    frames = [f"main ({PROJECT}/train.py:3)", "get (/usr/lib/python3.11/queue.py:171)"]
    made = of_rows(stretches=[{"frames": frames, "waiting": True, "start_ns": T0, "end_ns": T0 + MS}])
    found = named(made, "get (queue.py:171)")
    assert [frame.place.function for frame in found.stack] == ["get", "main"]
    assert found.place is not None
    assert (found.place.place.line, facts(found)["state"]) == (3, "waiting")
    assert named(made, "main (train.py:3)").place == found.place


@pytest.mark.parametrize("identifier", [-1, 7, 10**12])
def test_a_slice_that_there_is_not_is_an_error(identifier: int) -> None:
    with pytest.raises(UsageError, match="no such slice"):
        detail(of_traces(a_step()), identifier)


def test_search_finds_a_step_by_its_number_and_keeps_to_a_worker() -> None:
    other = Slices(rank=1, trace="worker1.pt.trace.json")
    other.add("cpu_op", "aten::matmul", 0, 10)
    made = of_traces(a_step(), other, steps=[{"step": 12, "start_ns": T0, "wall_ns": MS}])
    assert [(hit.step, hit.duration_ns) for hit in search(made, "step 12").hits] == [(12, MS)]
    assert search(made, "matmul", worker="worker1").total == 1
    assert search(made, "matmul").total == 2
    assert [search(made, text).total for text in ("", "   ", "not there", "((")] == [0, 0, 0, 0]
