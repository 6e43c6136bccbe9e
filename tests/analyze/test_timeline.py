"""Windows of the timeline hold every slice that can be seen, and nothing is lost by drawing the others together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.pictures import timeline as timelines_of
from stepscope.analyze.pictures.timeline import MAX_DEPTH, Timeline
from stepscope.analyze.pictures.timeline_queries import moments, viewport
from tests.analyze.timelines import US, Drawn, a_step, drawn, of_rows, of_traces
from tests.analyze.traces import Slices
from tests.builders import MS, T0, step_rows


def whole(made: Timeline, width: int = 1_000, **more: Any) -> list[Drawn]:
    return drawn(viewport(made, 0, made.length_ns, width, **more))


@pytest.mark.parametrize(
    ("category", "name", "kind"),
    [
        ("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data_wait"),
        ("Operator", "Optimizer.step#SGD.step", "optimizer"),
        ("user_annotation", "my range", "annotation"),
        ("python_function", "torch/nn/modules/module.py(1): __call__", "library_function"),
        ("gpu_memset", "Memset (Device)", "fill"),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("cuda_driver", "cuLaunchKernel", "runtime"),
        ("hip_runtime", "hipStreamSynchronize", "sync"),
        ("never seen", "x", "other"),
    ],
)
def test_the_kind_of_a_slice(category: str, name: str, kind: str) -> None:
    trace = Slices()
    device = {"track": "0/7", "stream": 7} if category in ("kernel", "gpu_memset") else {}
    trace.add(category, name, 0, 100, **device)
    assert [each.kind for each in whole(of_traces(trace))] == [kind]


def test_a_window_holds_no_more_than_it_may() -> None:
    trace = Slices()
    for number in range(3_000):
        trace.add("cpu_op", f"op{number % 7}", number * 10, 9, depth=number % 3)
    made = of_traces(trace)
    found = viewport(made, 0, made.length_ns, 8_000, limit=100)
    assert 0 < len(drawn(found)) <= 100
    assert found.total == 3_000 == sum(each.count for each in drawn(found))


def test_more_lanes_than_slices_allowed_end_with_one_slice_each() -> None:
    trace = Slices()
    for depth in range(20):
        for number in range(5):
            trace.add("cpu_op", "op", number * 10, 5, depth=depth)
    made = of_traces(trace)
    assert len(whole(made, limit=7)) == 20


def test_what_is_too_deep_is_told_and_not_drawn() -> None:
    trace = Slices()
    for depth in range(MAX_DEPTH + 2):
        trace.add("python_function", "f.py(1): f", 0, 100, depth=depth)
    made = of_traces(trace)
    assert made.tracks[0].depth == MAX_DEPTH
    assert any("2 slices" in note for note in made.notes)


SLICES = st.lists(
    st.tuples(st.integers(0, 40_000), st.integers(0, 3_000), st.integers(0, 2), st.sampled_from(["a", "b", "c"])),
    min_size=1,
    max_size=120,
)


def laid_out(slices: list[tuple[int, int, int, str]]) -> Slices:
    """Slices (start, duration, depth, name in µs) moved so that those of a depth follow each other."""
    trace = Slices()
    ends: dict[int, int] = {}
    for start, duration, depth, name in sorted(slices):
        begin = max(start, ends.get(depth, 0))
        ends[depth] = begin + duration
        trace.add("cpu_op" if name != "c" else "python_function", name, begin, duration, depth=depth)
    return trace


@settings(deadline=None, max_examples=60)
@given(SLICES, st.integers(1, 300), st.floats(0, 1), st.floats(0, 1))
def test_windows_count_every_slice_and_show_every_wide_one(
    slices: list[tuple[int, int, int, str]], width: int, left: float, right: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timelines_of, "_FEW", 4)  # so that few slices have coarser copies too
        patch.setattr(timelines_of, "_BINS", 2)
        trace = laid_out(slices)
        made = of_traces(trace)
    low, high = sorted((int(left * made.length_ns), int(right * made.length_ns) + 1))
    found = viewport(made, low, high, width)
    shown = drawn(found)
    first = min(row["start_ns"] for row in trace.events)
    inside = [
        (row["depth"], row["start_ns"] - first, row["start_ns"] - first + row["duration_ns"])
        for row in trace.events
        if row["start_ns"] - first < high and row["start_ns"] - first + row["duration_ns"] > low
    ]

    assert sum(each.count for each in shown) >= len(inside)
    bin_ns = max((high - low) // width, 1)
    alone = {(each.depth, each.start_us * US, each.end_us * US) for each in shown if each.count == 1}
    assert {each for each in inside if each[2] - each[1] >= bin_ns} <= alone
    for depth, start, end in inside:
        assert any(each.depth == depth and each.start_us * US <= start and each.end_us * US >= end for each in shown)


def test_sampled_workers_show_what_they_stood_in() -> None:
    work = [
        "_worker_loop (/v/torch/utils/data/_utils/worker.py:100)",
        "decode (/home/user/project/data.py:20)",
        "resize",
    ]
    rest = {"start_ns": T0 + 2 * MS, "end_ns": T0 + 4 * MS}
    made = of_rows(
        steps=step_rows(2),
        stretches=[
            {"role": "loader_worker", "pid": 300, "frames": work, "start_ns": T0, "end_ns": T0 + MS},
            {"role": "loader_worker", "pid": 300, "frames": work[:2], "start_ns": T0 + MS, "end_ns": T0 + 2 * MS},
            {"role": "loader_worker", "pid": 300, "frames": [work[0], "get"], "waiting": True, **rest},
        ],
    )

    found = [each for each in whole(made) if "worker" in each.track]

    assert [(each.depth, each.name, each.kind, each.start_us, each.end_us) for each in found] == [
        (0, "decode (data.py:20)", "user_function", 0, 2_000),
        (0, "get", "waiting", 2_000, 4_000),
        (1, "resize", "sampled", 0, 1_000),
    ]
    assert next(track.label for track in made.tracks if track.kind == "worker") == "loader worker 300"


def test_a_run_with_nothing_in_it_has_an_empty_timeline() -> None:
    made = of_rows()
    assert (made.tracks, made.length_ns, whole(made)) == ((), 0, [])
    assert moments(made) == (0, 1)


def test_traces_of_another_day_are_not_in_the_first_window() -> None:
    beside, later = (Slices(rank=rank, trace=f"worker{rank}.pt.trace.json") for rank in (1, 2))
    beside.add("cpu_op", "beside", 500, 1_000)
    later.add("cpu_op", "later", 10_000_000, 1_000)
    made = of_traces(a_step(), beside, later)
    assert moments(made) == (0, 1_500 * US)
    assert moments(made, worker="worker2") == (10_000_000 * US, 10_001_000 * US)
