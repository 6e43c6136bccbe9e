"""Figures over time: what each bucket holds, and that buckets together are the whole."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze.context import Context
from stepscope.analyze.views import gpus, overview
from stepscope.model.views import Counter
from tests.analyze.shared_traces import PRESENT, files, needs_traces, run_of
from tests.analyze.traces import US, Slices, tables
from tests.builders import T0

LENGTH_US = 1000  # of the traces here: buckets of 5 µs


def counters_of(trace: Slices) -> dict[str, Counter]:
    """Of one device, by metric; a range of the host makes the trace `LENGTH_US` long."""
    trace.add("user_annotation", "whole", 0, LENGTH_US)
    found = gpus.counters(Context(tables(trace)).base)
    assert all((one.start_ns, one.end_ns, one.bucket_ns) == (T0, T0 + LENGTH_US * US, 5 * US) for one in found)
    assert all(len(one.values) == 200 for one in found)
    return {one.metric: one for one in found}


def filled(counter: Counter) -> dict[float, float]:
    """Start of each bucket in µs -> its value, where that is not 0."""
    step = counter.bucket_ns / US
    return {i * step: value for i, value in enumerate(counter.values) if value}


def kernel(trace: Slices, start_us: float, duration_us: float, launch_us: float | None = None, **columns: Any) -> None:
    category = columns.pop("category", "kernel")
    trace.events[trace.kernel(start_us, duration_us, category=category)].update(columns)
    if launch_us is not None:
        link = trace.links[-1]
        link.update(launch=trace.add("cuda_runtime", "cudaLaunchKernel", launch_us, 1), state="linked")


def test_queue_length_is_of_launches_not_yet_begun() -> None:
    trace = Slices()
    kernel(trace, 10, 5, launch_us=0)
    kernel(trace, 15, 5, launch_us=5)
    kernel(trace, 30, 5, launch_us=31)  # a clock that is off makes no negative queue
    kernel(trace, 0, 5)
    assert filled(counters_of(trace)["queue_length"]) == pytest.approx({0: 1, 5: 2, 10: 1})


def test_copies_spread_their_bytes_over_their_time() -> None:
    trace = Slices()
    kernel(trace, 0, 10, category="gpu_memcpy", bytes=1_000_000)
    kernel(trace, 5, 5, category="gpu_memcpy", bytes=500_000)
    kernel(trace, 20, 5, category="gpu_memcpy")
    kernel(trace, 30, 0, category="gpu_memcpy", bytes=500)
    values = filled(counters_of(trace)["copy_bytes_per_s"])
    assert values == pytest.approx({0: 1e11, 5: 2e11, 30: 1e8})


@needs_traces
@pytest.mark.parametrize("name", files() if PRESENT else [])
def test_buckets_make_up_the_whole(name: str) -> None:
    base = Context(run_of(name).tables).base
    found = gpus.counters(base)
    summaries = {one.gpu.device: one for one in gpus.summaries(base, overview.overviews(base))}
    assert {one.device for one in found if one.metric == "utilization_pct"} == set(summaries)
    for one in found:
        assert 1 < len(one.values) <= gpus.MAX_BUCKETS
        assert one.unit == gpus.UNITS[one.metric]
        assert min(one.values) >= 0
        if one.metric.endswith("_pct"):
            assert max(one.values) <= 100.000001
        last_ns = one.end_ns - one.start_ns - (len(one.values) - 1) * one.bucket_ns
        assert 0 < last_ns <= one.bucket_ns
        whole = sum(one.values[:-1]) * one.bucket_ns + one.values[-1] * last_ns
        if one.metric == "copy_bytes_per_s":
            copied = base.spans[0].events.filter(base.spans[0].is_copy)["bytes"].sum()
            assert whole / 1e9 == pytest.approx(copied)
        if one.metric == "utilization_pct":
            summary = summaries[one.device]
            assert summary.utilization_pct is not None
            assert whole >= summary.utilization_pct * summary.window_ns * 0.999999


def test_nothing_of_a_trace_without_a_device() -> None:
    trace = Slices()
    trace.add("cpu_op", "aten::mm", 0, 10)
    assert gpus.counters(Context(tables(trace)).base) == ()
