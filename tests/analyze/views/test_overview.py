"""The overview and the devices of traces: the plugin's own figures, the steps it cut, and figures over time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.views import overview
from stepscope.model.views import (
    DEVICE,
    DEVICE_PARTS,
    HOST,
    HOST_PARTS,
    IDLE_PARTS,
    PLUGIN_PARTS,
    Counter,
    GpuSummary,
    Overview,
)
from tests.analyze.shared_traces import needs_traces, run_of
from tests.analyze.traces import US, Slices, tables
from tests.builders import T0

DATALOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def step(number: int, start_us: float, duration_us: float) -> dict[str, Any]:
    return {
        "step": number,
        "start_ns": T0 + round(start_us * US),
        "wall_ns": round(duration_us * US),
        "in_window": True,
    }


def overviews_of(*traces: Slices, steps: list[dict[str, Any]] | None = None) -> tuple[Overview, ...]:
    return overview.overviews(Context(tables(*traces, steps=steps or [])).base)


def overview_of(trace: Slices, *steps: dict[str, Any]) -> Overview:
    for row in steps:
        trace.add("user_annotation", f"ProfilerStep#{row['step']}", (row["start_ns"] - T0) / US, row["wall_ns"] / US)
    (found,) = overviews_of(trace, steps=list(steps))
    return found


def used(parts: dict[str, int]) -> dict[str, float]:
    """The parts that have time, in µs."""
    return {part: ns / US for part, ns in parts.items() if ns}


def launched(
    trace: Slices,
    launch_us: float,
    start_us: float,
    duration_us: float,
    name: str = "gemm",
    *,
    category: str = "kernel",
    **more: Any,
) -> int:
    """A device slice from `start_us` on whose call of 1 µs begins at `launch_us`."""
    number = trace.kernel(start_us, duration_us, name, category=category, **more)
    call = trace.add("cuda_runtime", "cudaLaunchKernel", launch_us, 1)
    trace.links[-1].update(launch=call, state="linked", method="correlation")
    return number


def check_sums(found: Overview) -> None:
    parts = (*DEVICE_PARTS, *IDLE_PARTS) if found.basis == DEVICE else tuple(HOST_PARTS)
    for one in found.steps:
        assert tuple(one.plugin_ns) == tuple(PLUGIN_PARTS)
        assert tuple(one.parts_ns) == parts
        for shares in (one.plugin_ns, one.parts_ns):
            assert min(shares.values()) >= 0
            assert sum(shares.values()) == one.wall_ns
    for summaries in (found.plugin, found.parts):
        assert sum(one.share for one in summaries.values()) == pytest.approx(1)
        assert sum(one.mean_ns for one in summaries.values()) == pytest.approx(found.wall.mean_ns)


# ---------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize(("last", "kept"), [(0, 1), (3, 1), (4, 2), (5, 2)])
def test_a_last_step_recorded_in_part_is_dropped(last: int, kept: int) -> None:
    trace = Slices()
    for number in range(5):
        launched(trace, 10 + 2 * number, 20 + 10 * number, 5)
    for number in range(last):
        launched(trace, 110 + 2 * number, 120 + 10 * number, 5)
    found = overview_of(trace, step(1, 0, 100), step(2, 100, 100))
    assert len(found.steps) == kept
    assert found.dropped_steps == 2 - kept
    assert found.wall.mean_ns == 100 * US


def test_a_trace_without_steps_is_one_step_from_first_to_last_host_slice() -> None:
    trace = Slices()
    trace.add("Trace", "PyTorch Profiler (0)", -100, 1000)
    trace.add("cpu_op", "aten::mm", 10, 20)
    launched(trace, 35, 50, 30)
    found = overview_of(trace)
    (only,) = found.steps
    assert (only.step, (only.start_ns - T0) / US, only.wall_ns / US) == ("0", 10, 70)
    assert not found.has_steps


def test_nothing_that_takes_time_gives_no_overview() -> None:
    trace = Slices()
    trace.add("Trace", "PyTorch Profiler (0)", 0, 1000)
    assert overviews_of(trace) == ()
    assert overviews_of() == ()


def test_slices_that_lack_what_slices_have() -> None:
    trace = Slices()
    trace.add("user_annotation", "ProfilerStep#1", 0, 100, track=None)
    trace.add("cpu_op", "aten::mm", 0, 40, track=None)
    trace.events[trace.add("cpu_op", "x", 5, 40)].update(name=None)
    trace.events[trace.add("cpu_op", "aten::add", 50, 40)].update(duration_ns=None)
    trace.events[trace.kernel(60, 20)].update(device=None, name=None, category="kernel")
    (found,) = overviews_of(trace, steps=[step(1, 0, 100)])
    check_sums(found)
    assert found.plugin["Kernel"].mean_ns == 20 * US


KINDS = [
    ("cpu_op", "aten::mm"),
    ("Operator", DATALOADER),
    ("user_annotation", "nccl:all_reduce"),
    ("user_annotation", "ProfilerStep#1"),
    ("python_function", "train.py(3): run"),
    ("cuda_runtime", "cudaMalloc"),
    ("cuda_runtime", "cudaLaunchKernel"),
    ("kernel", "gemm"),
    ("kernel", "ncclDevKernel_AllReduce"),
    ("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)"),
    ("Memset", "Memset (Device)"),
]
slices = st.tuples(st.sampled_from(KINDS), st.integers(0, 400), st.integers(0, 200), st.integers(0, 2))


@settings(max_examples=40, deadline=None)
@given(st.lists(slices, min_size=1, max_size=25), st.integers(0, 3), st.data())
def test_any_slices_sum_to_their_steps(
    rows: list[tuple[tuple[str, str], int, int, int]], count: int, data: st.DataObject
) -> None:
    trace = Slices()
    calls = [i for i, ((category, _), *_) in enumerate(rows) if category == "cuda_runtime"]
    for i, ((category, name), start, duration, track) in enumerate(rows):
        if category in ("kernel", "gpu_memcpy", "Memset"):
            trace.kernel(start, duration, name, category=category)
            launch = data.draw(st.sampled_from([None, *calls]))
            trace.links[-1].update(launch=launch, state="unlinked" if launch is not None else "before_recording")
        else:
            trace.add(category, name, start, duration, track=f"1/{track}")
        assert trace.events[-1]["id"] == i
    for found in overviews_of(trace, steps=[step(i, 100 * i, 80) for i in range(count)]):
        check_sums(found)


CONVERT = "torch/_dynamo/convert_frame.py(631): __call__"
IDLE = {
    "idle_data": [
        ("user_annotation", DATALOADER),
        ("python_function", "torch/utils/data/dataloader.py(700): __next__"),
    ],
    "idle_sync": [
        ("cuda_runtime", "cudaDeviceSynchronize"),
        ("cuda_runtime", "cudaStreamSynchronize"),
        ("cuda_runtime", "hipEventSynchronize"),
        ("cuda_runtime", "cudaMemcpy"),
        ("cuda_driver", "cuCtxSynchronize"),
        *(("xpu_runtime", name) for name in ("urQueueFinish", "urEventWait", "zeEventHostSynchronize")),
        ("privateuse1_runtime", "aclrtSynchronizeStream"),
        ("mtia_runtime", "synchronizeStream"),
    ],
    "idle_compile": [
        ("python_function", CONVERT),
        ("python_function", "torch/_inductor/compile_fx.py(788): compile_fx_inner"),
        ("python_function", "triton/compiler/compiler.py(226): compile"),
        ("cpu_op", "CachingAutotuner.benchmark_all_configs (dynamo_timed)"),
        ("cuda_driver", "cuModuleLoadData"),
    ],
    "idle_allocator": [
        *(("cuda_runtime", name) for name in ("cudaMalloc", "cudaFree", "cudaHostAlloc")),
        *(("xpu_runtime", name) for name in ("urUSMDeviceAlloc", "urUSMFree")),
    ],
    "idle_launch": [
        ("cuda_runtime", "cudaLaunchKernel"),
        ("cuda_driver", "cuLaunchKernelEx"),
        ("cuda_runtime", "cudaMemcpyAsync"),
        ("cuda_runtime", "hipGraphLaunch"),
        ("xpu_runtime", "urEnqueueKernelLaunch"),
    ],
    "idle_io": [
        ("python_function", "<built-in function open>"),
        ("python_function", "<built-in method write of _io.BufferedWriter object at 0x7f00>"),
        ("python_function", "torch/serialization.py(950): save"),
    ],
    "idle_operators": [("cpu_op", "aten::mm")],
    "idle_python": [
        ("python_function", "train.py(10): train"),
        # code that torch.compile has made, and what leads to it, runs in every step
        ("python_function", "torch/_dynamo/eval_frame.py(830): compile_wrapper"),
        ("python_function", "torch/_inductor/utils.py(3300): run"),
    ],
    "idle_unknown": [("user_annotation", "my region")],
}


@pytest.mark.parametrize(("part", "category", "name"), [(part, *kind) for part in IDLE for kind in IDLE[part]])
def test_what_the_host_did_while_the_device_was_idle(part: str, category: str, name: str) -> None:
    trace = Slices()
    trace.add("python_function", "train.py(1): <module>", 0, 20)
    trace.add(category, name, 20, 50)
    trace.kernel(60, 40)
    (only,) = overview_of(trace, step(1, 0, 100)).steps
    expected = {"compute": 40.0, "idle_python": 20.0}
    expected[part] = expected.get(part, 0) + 40
    assert used(only.parts_ns) == expected


def test_a_trace_without_a_device_is_split_by_what_the_host_did() -> None:
    trace = Slices()
    trace.add("python_function", "train.py(1): <module>", 0, 90)
    trace.add("user_annotation", DATALOADER, 0, 10)
    trace.add("cpu_op", "aten::conv2d", 10, 20)
    trace.add("cpu_op", "aten::mkldnn_convolution", 11, 18)
    trace.add("cpu_op", "aten::addmm", 30, 10)
    trace.add("cpu_op", "aten::scaled_dot_product_attention", 40, 5)
    trace.add("cpu_op", "aten::native_layer_norm", 45, 5)
    trace.add("cpu_op", "aten::relu", 50, 5)
    trace.add("cpu_op", "aten::copy_", 55, 5)
    trace.add("user_annotation", "Optimizer.step#SGD.step", 60, 10)
    trace.add("cpu_op", "aten::add_", 62, 6)
    trace.add("user_annotation", "gloo:all_reduce", 50, 30, track="1/9")  # beside relu, copies and the optimizer
    found = overview_of(trace, step(1, 0, 100))
    assert found.basis == HOST
    (only,) = found.steps
    assert used(only.parts_ns) == {
        "host_data": 10,
        "host_convolution": 20,
        "host_matmul": 10,
        "host_attention": 5,
        "host_normalization": 5,
        "host_optimizer": 6,
        "host_copies": 5,
        "host_operators": 5,
        "host_communication": 14,
        "host_python": 10,
        "host_unknown": 10,
    }


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


# The plugin's own code on newer traces: utilisation, SM efficiency; and achieved occupancy, which is the plugin's where
# no kernel takes more than 48 KB of shared memory. It has 32.46, 35.31 and 64.00 where some do, with 0 for these.
NEWER = {
    "hta/trace_diff/control/control.json.gz": (79.38091583525199, 59.20521304123595, 33.57710691132615),
    "hta/df_index_resolver/df_index_resolver.json.gz": (56.26663643864844, 34.11788322931888, 31.95263325285138),
    "hta/nccl_parser_config/nccl_data.json.gz": (23.26278028168871, 16.868842991905691, 37.78978593627434),
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz": (90.27012231005102, 88.57437622319881, 68.97259827608283),
}


@needs_traces
@pytest.mark.parametrize("name", NEWER)
def test_the_plugins_figures_of_newer_traces(name: str) -> None:
    (found,) = summaries_of(Context(run_of(name).tables))
    ours = (found.utilization_pct, found.sm_efficiency_pct, found.achieved_occupancy_pct)
    assert ours == pytest.approx(NEWER[name], rel=1e-6)


def test_kernels_without_an_occupancy_do_not_lower_the_mean() -> None:
    trace = Slices()
    kernel(trace, 0, 40, occupancy_percent=50.0)
    kernel(trace, 50, 40)
    kernel(trace, 90, 10, occupancy_percent=0.0)
    assert summary_of(trace).achieved_occupancy_pct == pytest.approx(40)


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
