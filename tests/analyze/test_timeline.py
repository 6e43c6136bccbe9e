"""The timeline: windows hold every slice that can be seen, what is told of one slice, and how slices are found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.pictures import timeline as timelines_of
from stepscope.analyze.pictures.timeline import MAX_DEPTH, Timeline, timeline
from stepscope.analyze.pictures.timeline_queries import detail, moments, search, viewport
from stepscope.errors import UsageError
from stepscope.model.timeline import SliceDetail, TimelineWindow
from tests.analyze.traces import US, Slices, tables
from tests.builders import MS, T0, make_tables, step_rows

PROJECT = "/home/user/project"
SOURCE = """def main(model, x):
    for _ in range(3):
        y = model(x)
    return y


def forward(x, w):
    y = x @ w
    return y.relu()
"""
MAIN, FORWARD = f"{PROJECT}/train.py(1): main", f"{PROJECT}/train.py(7): forward"


class Drawn(NamedTuple):
    """A slice of a window; times in µs since the run's first instant."""

    track: str
    depth: int
    name: str
    kind: str
    start_us: float
    end_us: float
    id: int
    count: int


def drawn(window: TimelineWindow) -> list[Drawn]:
    """The slices of a window one by one."""
    return [
        Drawn(
            track.key,
            depth,
            window.names[name],
            window.kinds[kind],
            (window.from_ns + start) / US,
            (window.from_ns + start + duration) / US,
            identifier,
            count,
        )
        for track in window.tracks
        for start, duration, depth, name, kind, identifier, count in zip(
            track.start, track.duration, track.depth, track.name, track.kind, track.id, track.count, strict=True
        )
    ]


def of_traces(*traces: Slices, sources: Mapping[str, str] | None = None, **more: Any) -> Timeline:
    """The timeline of traces and further rows (`steps`, `stretches`)."""
    return timeline(Context(tables(*traces, **more), sources or {f"{PROJECT}/train.py": SOURCE}))


def of_rows(**rows: Any) -> Timeline:
    """The timeline of a run without a trace."""
    return timeline(Context(make_tables(**rows)))


def a_step() -> Slices:
    """A step of 1,000 µs: main > forward > mm > launch, and the kernel of the launch at 500 µs, for 200 µs."""
    made = Slices()
    main = made.add("python_function", MAIN, 0, 1_000)
    forward = made.add("python_function", FORWARD, 100, 600, parent=main, frame=main, depth=1)
    mm = made.add("cpu_op", "aten::matmul", 150, 100, parent=forward, frame=forward, depth=2, shapes="[[2, 2], [2, 2]]")
    launch = made.add("cuda_runtime", "cudaLaunchKernel", 200, 10, parent=mm, frame=forward, depth=3)
    made.add("cuda_runtime", "cudaDeviceSynchronize", 800, 100, parent=main, frame=main, depth=1)
    device = {"track": "0/7", "stream": 7, "device": 0}
    kernel = made.add("kernel", "gemm_f16", 500, 200, **device, blocks=64, threads=256, step=None)
    made.add("gpu_memcpy", "Memcpy HtoD", 750, 50, **device, bytes=4_000)
    made.links.append(
        {
            "process": "rank-0",
            "trace": made.events[0]["trace"],
            "event": kernel,
            "launch": launch,
            "operator": mm,
            "frame": forward,
            "method": "correlation",
            "state": "linked",
        }
    )
    return made


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
        at_once = of_traces(trace)
        patch.setattr(timelines_of, "_STRETCH", 3)  # as they are merged of a large trace
        made = of_traces(trace)
    low, high = sorted((int(left * made.length_ns), int(right * made.length_ns) + 1))
    found = viewport(made, low, high, width)
    assert found == viewport(at_once, low, high, width)
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


def test_traces_of_another_day_are_not_in_the_first_window() -> None:
    beside, later = (Slices(rank=rank, trace=f"worker{rank}.pt.trace.json") for rank in (1, 2))
    beside.add("cpu_op", "beside", 500, 1_000)
    later.add("cpu_op", "later", 10_000_000, 1_000)
    made = of_traces(a_step(), beside, later)
    assert moments(made) == (0, 1_500 * US)
    assert moments(made, worker="worker2") == (10_000_000 * US, 10_001_000 * US)


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
