"""Whatever a trace looks like: unchanged it replays as recorded, and a smaller change never makes anything earlier."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.device import replay
from stepscope.analyze.device.device_losses import trace_losses
from stepscope.analyze.device.replay import Change, Graph, Replayed
from stepscope.engine import intervals
from stepscope.engine.intervals import Intervals
from tests.analyze.device_scenes import ADD, SGEMM, Scene
from tests.builders import T0
from tests.records import some

LENGTH = 2000  # of a step, us
CALLS = (
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMalloc"),
    *("cudaMemcpy", "cudaEventQuery"),
)
times = st.integers(0, LENGTH - 1)
kernels = st.tuples(times, st.integers(0, 300), st.integers(0, 400), st.sampled_from([7, 8, 20]))
calls = st.tuples(st.sampled_from(CALLS), times, st.integers(0, 500))
moments = st.integers(0, 2 * LENGTH * 1000)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Of two steps in which anything happens at any time: overlaps, waits for nothing, slices before their launch."""
    scene = Scene()
    for _ in range(2):
        scene.step(LENGTH)
        scene.kernel(SGEMM, 10, 50)  # so that each step has device work
        for start, late, length, stream in draw(st.lists(kernels, max_size=8)):
            launch = scene.call("cudaLaunchKernel", start, 5) if late < 290 else None
            scene.work(ADD, start + late - 10, length, launch=launch, stream=stream)
        for name, start, length in draw(st.lists(calls, max_size=4)):
            scene.call(name, start, length)
    return graph_of(scene)


def graph_of(scene: Scene) -> Graph:
    (found,) = trace_losses(Context(scene.tables()).base)
    return some(replay.graph_of(found))


@st.composite
def sets(draw: st.DrawFn) -> Intervals:
    pairs = draw(st.lists(st.tuples(moments, st.integers(1, 500_000)), max_size=6))
    starts = np.asarray([T0 + start for start, _ in pairs], np.int64)
    return intervals.union(starts, starts + np.asarray([length for _, length in pairs], np.int64))


@settings(max_examples=40, deadline=None)
@given(graphs())
def test_unchanged_every_slice_starts_when_it_was_recorded_to(graph: Graph) -> None:
    played = Replayed(graph, Change())
    assert (played.end_ns - played.start_ns == graph.duration_ns).all()
    late = played.start_ns - graph.start_ns
    assert late.tolist() == [0] * len(late)


def test_a_wait_that_ends_before_what_it_waits_for_replays_as_recorded() -> None:
    scene = Scene()
    scene.step(LENGTH)
    scene.work(ADD, 10, 12, launch=scene.call("cudaLaunchKernel", 5, 2))
    scene.call("cudaDeviceSynchronize", 10, 11)  # over 1 us before the kernel, by its own clock
    scene.kernel(SGEMM, 100, 50)
    graph = graph_of(scene)
    assert len(graph.wait_begin_ns) == 1
    assert (Replayed(graph, Change()).start_ns == graph.start_ns).all()


@settings(max_examples=40, deadline=None)
@given(graphs(), sets(), sets(), st.floats(0, 1), st.floats(0, 1), st.data())
def test_a_smaller_change_never_makes_anything_earlier(
    graph: Graph, one: Intervals, more: Intervals, part: float, other: float, data: st.DataObject
) -> None:
    slices = graph
    most, least = max(part, other), min(part, other)
    flags = np.asarray(data.draw(st.lists(st.booleans(), min_size=len(slices), max_size=len(slices))), bool)
    small = Change(one, (slices.duration_ns * most).astype(np.int64), flags & (slices.start_ns % 2 == 0))
    large = Change(intervals.merge(one, more), (slices.duration_ns * least).astype(np.int64), flags)
    nothing, some, all_of_it = (Replayed(graph, change) for change in (Change(), small, large))
    for before, after in ((nothing, some), (some, all_of_it)):
        assert (after.end_ns <= before.end_ns).all()
        assert (after.start_ns <= before.start_ns).all()
        moments_ns = np.linspace(graph.step_start_ns[0], graph.step_end_ns[-1], 40).astype(np.int64)
        assert (after.host_ns(moments_ns) <= before.host_ns(moments_ns)).all()


@settings(max_examples=40, deadline=None)
@given(graphs(), sets())
def test_the_order_of_host_and_streams_is_kept(graph: Graph, cut: Intervals) -> None:
    played, slices = Replayed(graph, Change(cut)), graph
    moments_ns = np.sort(np.concatenate([graph.step_start_ns, graph.step_end_ns, slices.launch_ns]))
    assert (np.diff(played.host_ns(moments_ns)) >= 0).all()
    follows = np.flatnonzero(slices.before >= 0)
    assert (played.start_ns[follows] >= played.end_ns[slices.before[follows]]).all()
    assert (played.start_ns >= played.host_ns(slices.launch_ns)).all()
