"""Device time by kind, and how much of it is linked."""

from __future__ import annotations

import pytest

from stepscope.analyze import analyze
from stepscope.model import Analysis, DeviceTime
from tests.analyze.traces import US, Slices, tables


def analysis_of(*traces: Slices) -> Analysis:
    return analyze(tables(*traces))


def of_scope(analysis: Analysis, scope: str) -> DeviceTime:
    (found,) = [time for time in analysis.device_time if time.scope == scope]
    return found


def test_each_kind_counts_what_the_ones_before_it_leave() -> None:
    trace = Slices()
    main = trace.add("cpu_op", "aten::mm")
    trace.kernel(0, 100, below=main)
    trace.kernel(50, 100, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", below=main)  # 50 of 100 hidden
    trace.kernel(140, 40, "Memcpy HtoD (Pinned -> Device)", category="gpu_memcpy", below=main)  # 10 of 40 hidden
    trace.kernel(200, 20, "Memset (Device)", category="gpu_memset", below=main)

    time = of_scope(analysis_of(trace), "launched")

    assert time.total_ns == 220 * US
    assert (time.compute_ns, time.communication_ns, time.memcpy_ns) == (120 * US, 100 * US, 40 * US)
    assert (time.exposed_communication_ns, time.exposed_memcpy_ns) == (50 * US, 30 * US)
    assert time.busy_ns == time.compute_ns + time.exposed_communication_ns + time.exposed_memcpy_ns == 200 * US
    assert time.idle_ns == 20 * US
    assert time.busy_share == pytest.approx(200 / 220)
    assert time.kind_ns == {"kernel": 200 * US, "gpu_memcpy": 40 * US, "gpu_memset": 20 * US}


def test_what_was_launched_before_the_recording_is_in_one_scope_only() -> None:
    trace = Slices()
    trace.kernel(0, 30)
    trace.kernel(40, 70, below=trace.add("cpu_op", "aten::mm"))
    analysis = analysis_of(trace)

    assert (of_scope(analysis, "launched").total_ns, of_scope(analysis, "launched").events) == (70 * US, 1)
    assert (of_scope(analysis, "all").total_ns, of_scope(analysis, "all").busy_ns) == (110 * US, 100 * US)
    (facts,) = analysis.traces
    assert (facts.device_ns, facts.before_recording_ns, facts.linked_ns) == (
        100 * US,
        30 * US,
        {"correlation": 70 * US},
    )
    assert facts.link_rate == 1
    assert analysis.reading is not None
    assert analysis.reading.before_recording_share == pytest.approx(0.3)


def test_the_link_rate_leaves_graphs_and_lost_links_out() -> None:
    trace = Slices()
    op = trace.add("cpu_op", "aten::mm")
    trace.kernel(0, 50, below=op)
    trace.kernel(50, 20, below=op, method="flow")
    trace.kernel(70, 20, below=op, method=None, state="graph")
    trace.kernel(90, 10, below=op, method=None, state="unlinked")
    (facts,) = analysis_of(trace).traces
    assert facts.linked_ns == {"correlation": 50 * US, "flow": 20 * US}
    assert (facts.graph_ns, facts.unlinked_ns, facts.before_recording_ns) == (20 * US, 10 * US, 0)
    assert sum(facts.linked_ns.values()) + facts.graph_ns + facts.unlinked_ns == facts.device_ns
    assert facts.link_rate == pytest.approx(0.7)
