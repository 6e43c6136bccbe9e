"""The overview: the plugin's own figures on its own traces, what it got wrong, and the steps it cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.views import overview
from stepscope.model.views import DEVICE, HOST
from tests.analyze.shared_traces import PRESENT, SHARED, files, needs_traces, run_of
from tests.analyze.traces import US, Slices
from tests.analyze.views.stepped import DATALOADER, check_sums, launched, overview_of, overviews_of, step
from tests.builders import T0

ORACLE: dict[str, Any] = json.loads((SHARED / "oracles" / "tb_plugin.json").read_text()) if PRESENT else {}


# ------------------------------------------------------------------------------------------ the plugin's figures


@needs_traces
@pytest.mark.parametrize("run", sorted({name.split("/")[0] for name in ORACLE}))
def test_the_plugins_breakdown(run: str) -> None:
    found = overview.overviews(Context(run_of(f"kineto_tb_plugin/{run}").tables).base)
    assert {f"{run}/{one.span.label}" for one in found} == {name for name in ORACLE if name.startswith(run)}
    for one in found:
        expected = ORACLE[f"{run}/{one.span.label}"]
        rows = overview.plugin_rows(one)
        assert rows == {key: expected[key] for key in ("average_step_us", "partition_us", "partition_pct", "steps")}
        assert one.dropped_steps == 0
        check_sums(one)


# The plugin's own code, told the categories that writers use since 2022: µs of a mean step, and percent.
NEW_CATEGORIES: dict[str, dict[str, float]] = {
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz": {
        "Kernel": 31760.1,
        "Memcpy": 2.4,
        "Memset": 143.1,
        "Runtime": 596.7,
        "CPU Exec": 1406.2,
        "Other": 1275.0,
        "step": 35183.4,
    },
    # In the next it counts most collectives as kernels, so of these only the sum can be the same.
    "hta/df_index_resolver/df_index_resolver.json.gz": {
        "Kernel+Communication": 204198.0,
        "Memcpy": 4372.4,
        "Memset": 178.4,
        "Runtime": 18714.0,
        "CPU Exec": 104959.0,
        "Other": 15122.2,
        "step": 347544.0,
    },
}


@needs_traces
@pytest.mark.parametrize("name", NEW_CATEGORIES)
def test_the_plugins_breakdown_of_newer_traces(name: str) -> None:
    (found,) = overview.overviews(Context(run_of(name).tables).base)
    ours = {part: one.mean_ns / US for part, one in found.plugin.items()} | {"step": found.wall.mean_ns / US}
    ours["Kernel+Communication"] = ours["Kernel"] + ours["Communication"]
    for part, expected in NEW_CATEGORIES[name].items():
        assert ours[part] == pytest.approx(expected, rel=0.001, abs=1), part


@needs_traces
@pytest.mark.parametrize("name", files() if PRESENT else [])
def test_every_trace_sums_to_its_steps(name: str) -> None:
    context = Context(run_of(name).tables)
    (found,) = overview.overviews(context.base)
    check_sums(found)
    (trace,) = run_of(name).analysis.traces
    assert found.basis == (DEVICE if trace.device_ns else HOST)
    assert found.has_steps == (context.tables.steps.height > 0)


# ---------------------------------------------------------------------------------------- what the plugin got wrong


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


# ------------------------------------------------------------------------------------------------- any trace

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
