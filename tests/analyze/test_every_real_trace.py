"""Real traces: device time, links and lines against what other tools compute on them, losses, replays, flame graphs.

All that analyses every one of them stands here, so that each is read and analysed once.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from stepscope.analyze.context import Context
from stepscope.analyze.device import device_time
from stepscope.analyze.pictures.trace_flame import TraceWindows
from stepscope.engine import spans
from stepscope.engine.device_work import KERNEL, Work, work
from stepscope.engine.spans import Span
from stepscope.model import DeviceTime
from stepscope.model.device_losses import ATTENTION, LAYOUT, MATRIX, POINTWISE
from stepscope.model.views import DEVICE
from stepscope.tables.arrays import Int64
from tests.analyze.flame.scenes import trees
from tests.analyze.shared_traces import PRESENT, SHARED, analysis_of, files, needs_traces, run_of
from tests.analyze.test_device import idle_bound, idle_ns
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


ALL = files() if PRESENT else []
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


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith(LINKED)])
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


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("kineto")])
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


@pytest.mark.parametrize("name", ALL)
def test_idle_losses_of_real_traces_stay_within_the_idle_time(name: str) -> None:
    analysis = analysis_of(name)
    assert analysis.views is not None
    overviews = [span.overview for span in analysis.views.spans if span.overview is not None]
    for found in analysis.device_losses:
        assert [overview.basis for overview in overviews] == [DEVICE]
        told = {one.kind: one.ns_per_step for one in found.losses}
        assert all(ns >= 0 for ns in told.values())
        assert idle_ns(found) <= idle_bound(overviews[0]) + 1
        assert all(told.get(kind, 0.0) <= found.compute_ns_per_step for kind in (MATRIX, ATTENTION, LAYOUT, POINTWISE))


@pytest.mark.parametrize("name", ALL)
def test_real_traces_replay_as_they_were_recorded(name: str) -> None:
    analysis = analysis_of(name)
    assert [found.run for found in analysis.replays] == [losses.run for losses in analysis.device_losses]
    for found in analysis.replays:
        assert found.left_out == ()
        assert found.residual <= 0.01
        assert found.unchanged_mean_ns == pytest.approx(found.recorded_mean_ns, rel=0.01)
        assert found.unchanged_median_ns == pytest.approx(found.recorded_median_ns, rel=0.01)


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith(("kineto_tb_plugin", "tracelens"))])
def test_real_traces_add_up_to_their_device_time(name: str) -> None:
    """And the lines of some cost what the table of lines says."""
    run = run_of(name)
    windows = TraceWindows(Context(run.tables))
    lines = run.analysis.device_lines
    assert lines is not None
    if windows.absent:
        assert "no Python stacks" in windows.absent
        assert lines.attributed_share == 0.0
        return
    found = trees(run.tables)
    assert found["operators"][0].value[0] > 0
    tree, frames = found["gpu"]
    ns = 1e6 * lines.steps if lines.steps else 1e3
    assert (tree.value[0], tree.unit) == (lines.total_ns / ns, "ms per step" if lines.steps else "us")
    assert {"kernel", "operator"} <= {frames[number].kind for number in tree.frame}
    if not any(part in name for part in ("resnet50_num_workers_0", "timesformer", "sglang_decode", "h100/Qwen")):
        return
    line: list[tuple[str, int | None] | None] = []  # by node the innermost of the user's
    drawn: defaultdict[tuple[str, int | None] | None, float] = defaultdict(float)
    below = np.zeros(len(tree.value))
    np.add.at(below, np.asarray(tree.parent[1:]), np.asarray(tree.value[1:]))
    for node, (parent, number) in enumerate(zip(tree.parent, tree.frame, strict=True)):
        frame = frames[number]
        line.append((frame.name, frame.line) if frame.kind == "user" else line[parent] if parent >= 0 else None)
        drawn[line[node]] += tree.value[node] - below[node]
    wanted: defaultdict[tuple[str, int | None] | None, float] = defaultdict(float)
    wanted[None] = sum(lines.unattributed.values()) / ns
    for each in lines.lines:
        wanted[None if each.guess else (each.place.function or "", each.place.line)] += each.ns / ns
    assert {key: value for key, value in drawn.items() if value > 1e-6} == pytest.approx(
        {key: value for key, value in wanted.items() if value > 1e-6}
    )
