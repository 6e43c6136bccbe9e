"""The summary of each device: the plugin's figures, and what clipping, streams and missing sizes do to them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stepscope.analyze.context import Context
from stepscope.analyze.views import overview
from stepscope.model.views import Counter, GpuSummary
from tests.analyze.shared_traces import PRESENT, SHARED, files, needs_traces, run_of
from tests.analyze.traces import US, Slices, tables
from tests.builders import T0

ORACLE: dict[str, Any] = json.loads((SHARED / "oracles" / "tb_plugin.json").read_text()) if PRESENT else {}


def summaries_of(context: Context) -> tuple[GpuSummary, ...]:
    return overview.summaries(context.base, overview.overviews(context.base))


def summary_of(trace: Slices, length_us: float = 100, **more: Any) -> GpuSummary:
    """Of the one device, over one step from 0 on."""
    trace.add("user_annotation", "ProfilerStep#1", 0, length_us)
    row = {"step": 1, "start_ns": T0, "wall_ns": round(length_us * US), "in_window": True}
    (found,) = summaries_of(Context(tables(trace, steps=[row], **more)))
    assert found.window_ns == length_us * US
    return found


def kernel(trace: Slices, start_us: float, duration_us: float, name: str = "gemm", **columns: Any) -> int:
    """A kernel with its columns (`blocks_per_sm`, `occupancy_percent`, `stream`, `device`)."""
    number = trace.kernel(start_us, duration_us, name)
    trace.events[number].update(columns)
    return number


def percent(text: str) -> float:
    return float(text.removesuffix(" %"))


@needs_traces
@pytest.mark.parametrize("run", sorted({name.split("/")[0] for name in ORACLE}))
def test_the_plugins_figures(run: str) -> None:
    for found in summaries_of(Context(run_of(f"kineto_tb_plugin/{run}").tables)):
        expected = ORACLE[f"{run}/{found.span.label}"]["gpu"]
        assert found.utilization_pct is not None
        assert found.sm_efficiency_pct is not None
        assert found.achieved_occupancy_pct is not None
        assert round(found.utilization_pct, 2) == percent(expected["GPU Utilization"])
        assert round(found.sm_efficiency_pct, 2) == percent(expected["Est. SM Efficiency"])
        assert round(found.achieved_occupancy_pct, 2) == percent(expected["Est. Achieved Occupancy"])
        assert found.tensor_core_plugin_pct == percent(expected["Kernel Time using Tensor Cores"])
        assert found.gpu.name == expected["Name"]
        assert found.gpu.capability == expected["Compute Capability"]
        assert found.gpu.memory_bytes is not None
        assert f"{found.gpu.memory_bytes / 2**30:.2f} GB" == expected["Memory"]


# The plugin's own code on newer traces: utilisation, SM efficiency, achieved occupancy.
NEWER = {
    "hta/trace_diff/control/control.json.gz": (79.38091583525199, 59.20521304123595, 32.46431952517049),
    "hta/df_index_resolver/df_index_resolver.json.gz": (56.26663643864844, 34.11788322931888, 31.95263325285138),
    "hta/nccl_parser_config/nccl_data.json.gz": (23.26278028168871, 16.868842991905691, 35.31432866744887),
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz": (90.27012231005102, 88.57437622319881, 64.00480540194175),
}


@needs_traces
@pytest.mark.parametrize("name", NEWER)
def test_the_plugins_figures_of_newer_traces(name: str) -> None:
    (found,) = summaries_of(Context(run_of(name).tables))
    ours = (found.utilization_pct, found.sm_efficiency_pct, found.achieved_occupancy_pct)
    assert ours == pytest.approx(NEWER[name], rel=1e-6)


def test_figures_without_a_source_are_none() -> None:
    trace = Slices()
    kernel(trace, 0, 40)
    found = summary_of(trace)
    assert found.sm_efficiency_pct is None
    assert found.achieved_occupancy_pct is None
    assert found.tensor_core_eligible_pct is None
    assert found.gpu.name is None
    assert found.tensor_core_pct == 0


def test_kernels_without_an_occupancy_do_not_lower_the_mean() -> None:
    trace = Slices()
    kernel(trace, 0, 40, occupancy_percent=50.0)
    kernel(trace, 50, 40)
    kernel(trace, 90, 10, occupancy_percent=0.0)
    assert summary_of(trace).achieved_occupancy_pct == pytest.approx(40)


def test_no_device_no_summary() -> None:
    trace = Slices()
    trace.add("cpu_op", "aten::mm", 0, 10)
    assert summaries_of(Context(tables(trace))) == ()


LENGTH_US = 1000  # of the traces here: buckets of 5 µs


def counters_of(trace: Slices) -> dict[str, Counter]:
    """Of one device, by metric; a range of the host makes the trace `LENGTH_US` long."""
    trace.add("user_annotation", "whole", 0, LENGTH_US)
    found = overview.counters(Context(tables(trace)).base)
    assert all((one.start_ns, one.end_ns, one.bucket_ns) == (T0, T0 + LENGTH_US * US, 5 * US) for one in found)
    assert all(len(one.values) == 200 for one in found)
    return {one.metric: one for one in found}


def filled(counter: Counter) -> dict[float, float]:
    """Start of each bucket in µs -> its value, where that is not 0."""
    step = counter.bucket_ns / US
    return {i * step: value for i, value in enumerate(counter.values) if value}


def filling(trace: Slices, start_us: float, duration_us: float, launch_us: float | None = None, **columns: Any) -> None:
    category = columns.pop("category", "kernel")
    trace.events[trace.kernel(start_us, duration_us, category=category)].update(columns)
    if launch_us is not None:
        link = trace.links[-1]
        link.update(launch=trace.add("cuda_runtime", "cudaLaunchKernel", launch_us, 1), state="linked")


def test_queue_length_is_of_launches_not_yet_begun() -> None:
    trace = Slices()
    filling(trace, 10, 5, launch_us=0)
    filling(trace, 15, 5, launch_us=5)
    filling(trace, 30, 5, launch_us=31)  # a clock that is off makes no negative queue
    filling(trace, 0, 5)
    assert filled(counters_of(trace)["queue_length"]) == pytest.approx({0: 1, 5: 2, 10: 1})


def test_copies_spread_their_bytes_over_their_time() -> None:
    trace = Slices()
    filling(trace, 0, 10, category="gpu_memcpy", bytes=1_000_000)
    filling(trace, 5, 5, category="gpu_memcpy", bytes=500_000)
    filling(trace, 20, 5, category="gpu_memcpy")
    filling(trace, 30, 0, category="gpu_memcpy", bytes=500)
    values = filled(counters_of(trace)["copy_bytes_per_s"])
    assert values == pytest.approx({0: 1e11, 5: 2e11, 30: 1e8})


@needs_traces
@pytest.mark.parametrize("name", files() if PRESENT else [])
def test_buckets_make_up_the_whole(name: str) -> None:
    base = Context(run_of(name).tables).base
    found = overview.counters(base)
    summaries = {one.gpu.device: one for one in overview.summaries(base, overview.overviews(base))}
    assert {one.device for one in found if one.metric == "utilization_pct"} == set(summaries)
    for one in found:
        assert 1 < len(one.values) <= overview.MAX_BUCKETS
        assert one.unit == overview.UNITS[one.metric]
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
    assert overview.counters(Context(tables(trace)).base) == ()
