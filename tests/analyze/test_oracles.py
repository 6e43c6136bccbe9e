"""Device time, links and lines of real traces, against what other tools compute on them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from stepscope.analyze.device import device_time
from stepscope.engine import spans
from stepscope.engine.device_work import KERNEL, Work, work
from stepscope.engine.spans import Span
from stepscope.model import DeviceTime
from stepscope.tables.arrays import Int64
from tests.analyze.shared_traces import PRESENT, SHARED, analysis_of, files, needs_traces, run_of
from tests.records import replace, some

pytestmark = needs_traces

ORACLES: dict[str, Any] = json.loads((SHARED / "oracles" / "hta_tracelens.json").read_text()) if PRESENT else {}
MULTIMEM = "tracelens/b200/eager_trace.json.gz"
DROPS_SLICES = "hta/trace_diff/test/test.json.gz"  # TraceLens loses most of them there
# Fractional microseconds since 1970: a float64, as both tools use, holds quarters of them there. Ours are exact.
ABSOLUTE = "hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz"
QUARTER_NS = 250
FIGURES = {
    "computation_time": "compute_ns",
    "exposed_comm_time": "exposed_communication_ns",
    "exposed_memcpy_time": "exposed_memcpy_ns",
    "busy_time": "busy_ns",
    "idle_time": "idle_ns",
    "total_time": "total_ns",
    "total_comm_time": "communication_ns",
    "total_memcpy_time": "memcpy_ns",
}


KNOWN = [name for name, oracle in ORACLES.items() if isinstance(oracle["tracelens"], dict) and name != DROPS_SLICES]


def scoped(name: str, scope: str) -> DeviceTime:
    (found,) = [time for time in analysis_of(name).device_time if time.scope == scope]
    return found


def as_float64(found: Work) -> Work:
    """Starts and ends as they are after a sum in absolute float64 microseconds."""

    def rounded(times: Int64) -> Int64:
        return (times + QUARTER_NS // 2) // QUARTER_NS * QUARTER_NS

    start = rounded(found.start_ns)
    return replace(found, start_ns=start, end_ns=rounded(start + found.end_ns - found.start_ns))


def span_of(name: str) -> Span:
    (span,) = spans.spans(run_of(name).tables)
    return span


def without_multimem(span: Span) -> Work:
    """All-reduces through symmetric memory as computation, which TraceLens takes them for."""
    found, names = work(span), span.names
    theirs = names.pick(["multimem_all_reduce" in value for value in names.values])[found.rows]
    assert theirs.any()
    return replace(found, kind=np.where(theirs, KERNEL, found.kind).astype(np.int8))


@pytest.mark.parametrize("name", KNOWN)
def test_device_time_agrees_with_tracelens(name: str) -> None:
    expected = ORACLES[name]["tracelens"]["gpu_timeline_ms"]
    ours = scoped(name, "launched")
    if name in (ABSOLUTE, MULTIMEM):
        exact, span = ours, span_of(name)
        found = as_float64(work(span)) if name == ABSOLUTE else without_multimem(span)
        ours = device_time.device_time(span, found, device_time.LAUNCHED, found.launch >= 0)
        if name == ABSOLUTE:
            assert exact.memcpy_ns == 3_715_404  # the sum of the durations in the file: no copy overlaps another
            assert exact.busy_ns == pytest.approx(ours.busy_ns, rel=0.001)
    for key, field in FIGURES.items():
        # half a microsecond for its printed digits
        assert getattr(ours, field) / 1e6 == pytest.approx(expected[key], rel=0.001, abs=0.0005), key


LINKED = ("kineto_tb_plugin", "tracelens/h100", "tracelens/b200", "tracelens/mi300")


@pytest.mark.parametrize("name", [name for name in (files() if PRESENT else []) if name.startswith(LINKED)])
def test_kernels_reach_their_operators(name: str) -> None:
    span = span_of(name)
    found = work(span)
    chosen = span.is_kernel[found.rows] & (found.launch >= 0)
    lengths = found.end_ns - found.start_ns
    assert lengths[chosen & (found.operator >= 0)].sum() / lengths[chosen].sum() >= 0.99
    (facts,) = analysis_of(name).traces
    assert facts.link_rate is not None
    assert facts.link_rate >= 0.99
    rest = facts.before_recording_ns + facts.graph_ns + facts.unlinked_ns
    assert sum(facts.linked_ns.values()) + rest == facts.device_ns


@pytest.mark.parametrize("name", [name for name in (files() if PRESENT else []) if name.startswith("kineto")])
def test_kernel_time_reaches_the_users_lines(name: str) -> None:
    found = some(analysis_of(name).device_lines)
    assert found.basis == "device"
    assert found.guessed_share == 0
    assert found.attributed_share is not None
    assert found.attributed_share >= 0.95
    ways: dict[str, int] = {}
    for line in found.lines:
        assert line.place.file == "resnet50_profiler_api.py"
        for way, ns in line.via.items():
            ways[way] = ways.get(way, 0) + ns
    assert ways["direct"] / found.total_ns == pytest.approx(0.36, abs=0.05)  # the forward pass
    assert ways["sequence"] / found.total_ns == pytest.approx(0.61, abs=0.05)  # the backward pass
    assert sum(ways.values()) + sum(found.unattributed.values()) == found.total_ns
