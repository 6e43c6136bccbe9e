"""Device time by kind, how much of it is linked, its lines, and the losses of devices, each nanosecond once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analyze import CodeOptions, analyze
from stepscope.analyze.device.device_time import (
    EARLY,
    ENGINE,
    LIBRARIES,
    NO_FORWARD,
    NO_LAUNCH,
    REPLAYED,
)
from stepscope.analyze.device.kernels import MULTIPLE, waste
from stepscope.api import open_run
from stepscope.model import Analysis, DeviceLine, DeviceLines, DeviceTime
from stepscope.model.device_losses import (
    ALLOCATOR,
    COMPILED,
    COPY_IN,
    DATA_PARALLEL,
    HOST,
    LAUNCH,
    LINALG,
    MATRIX,
    OPTIMIZER,
    POINTWISE,
    SYNC,
    ZERO_GRAD,
    DeviceLosses,
    Loss,
)
from stepscope.model.views import Overview
from tests import gpu_traces
from tests.analyze.device_scenes import (
    ADD,
    P100,
    SGEMM,
    TENSOR,
    V100,
    Scene,
    allocations,
    batch_copies,
    compiled,
    decompositions,
    host_work,
    pointwise_run,
    products,
    reads_value,
    repeated,
    replicas,
    short_launches,
    updates,
    zeros,
)
from tests.analyze.traces import BACK_THREAD, US, Slices, tables
from tests.records import some


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


FOREIGN: dict[str, Any] = {"run": {"user_roots": (), "hosts": ()}, "ranks": ()}


def lines_of(*traces: Slices, options: CodeOptions | None = None, **more: Any) -> DeviceLines:
    found = some(analyze(tables(*traces, **{**FOREIGN, **more}), options=options or CodeOptions()).device_lines)
    assert sum(line.ns for line in found.lines) + sum(found.unattributed.values()) == found.total_ns
    assert sum(line.share for line in found.lines) + sum(found.unattributed_shares.values()) == pytest.approx(1)
    assert all(sum(line.via.values()) == line.ns for line in found.lines)
    return found


def places(found: DeviceLines) -> dict[tuple[str, int | None], int]:
    return {(line.place.file, line.place.line): line.ns // US for line in found.lines}


def only(found: DeviceLines) -> DeviceLine:
    (line,) = found.lines
    return line


def test_what_has_no_line_has_a_reason() -> None:
    trace = Slices()
    loop = trace.python("torch/utils/data/dataloader.py(1): __next__")
    node = trace.add("cpu_op", "AddBackward0", sequence=9, forward_thread=BACK_THREAD)
    trace.kernel(0, 1)
    trace.kernel(10, 2, below=trace.add("cpu_op", "aten::copy_", parent=loop))
    trace.kernel(20, 3, below=node)
    trace.kernel(30, 4, below=loop, state="graph", method=None)
    trace.kernel(40, 5, below=loop, state="unlinked", method=None, launch=None)
    for event in (node, trace.add("cpu_op", "aten::add")):
        trace.events[event]["track"] = "1/2"
    trace.kernel(50, 6, below=trace.add("cpu_op", "aten::add", track="1/2"))
    trace.events[-2]["track"] = "1/2"
    reasons = {EARLY: 1, LIBRARIES: 2, NO_FORWARD: 3, REPLAYED: 4, NO_LAUNCH: 5, ENGINE: 6}

    found = lines_of(trace)

    assert found.lines == ()
    assert found.unattributed == {why: us * US for why, us in reasons.items()}
    assert list(found.unattributed.values()) == sorted(found.unattributed.values(), reverse=True)


@pytest.mark.parametrize(
    ("callee", "started", "line", "exact"),
    [
        ("torch/nn/functional.py(9): linear", 1, 4, True),
        ("aten::matmul", 1, 3, True),  # by its sign
        ("aten::mul_", 1, 5, True),
        ("torch/nn/functional.py(3): norm", 1, 1, False),  # called twice: either line may be meant
        ("aten::sort", 1, 1, False),  # not in the text
        ("torch/optim/optimizer.py(480): wrapper", 1, 7, True),
        ("torch/nn/functional.py(9): linear", 3, 4, True),  # ran when the recording began: the line it was at
        ("torch/nn/functional.py(9): linear", 99, 99, False),  # the file has changed
    ],
)
def test_a_line_is_exact_where_the_source_leaves_no_doubt(callee: str, started: int, line: int, exact: bool) -> None:
    file = "/home/user/project/train.py"
    source = "def train(x, y):\n    x = norm(norm(x) if y else\n        x @ y)\n    z = linear(x)\n"
    source += "    z *= 2\n    z = norm(z)\n    optimizer.step()\n    return z\n"
    trace = Slices()
    frame = trace.python(f"train.py({started}): train")
    below = trace.add("cpu_op", callee, parent=frame) if callee.startswith("aten") else trace.python(callee, frame)
    trace.kernel(0, 10, below=below)
    found = some(analyze(tables(trace), {file: source}).device_lines)
    assert [(row.place.line, row.exact_line) for row in found.lines] == [(line, exact)]


def test_a_file_that_ran_already_has_no_line_where_none_is_known() -> None:
    trace = Slices()
    trace.kernel(0, 10, below=trace.python("torch/nn/functional.py(9): linear", trace.python("train.py(13): <module>")))
    line = only(lines_of(trace))
    assert (line.place.line, line.exact_line) == (None, False)


MODULES = """\
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        self.norm, self.heads = make(), nn.ModuleList()

    def loss(self, x, y):
        out = self.norm(
            self.stem(x).tail())
        return F.mse_loss(out, y)

    def either(self, x):
        if self.fixed:
            return self.norm(x)
        x = [self.stem(row) for row in x]
        return sum(head(row).item() for row in x)

    def train(self, x):
        stem = Stem().to(0)
        criterion = nn.MSELoss()
        for row in x:
            out = stem(row)
            loss = criterion(out, row)


def steps(a, b):
    a = F.relu(a)
    b = F.relu(
        F.relu(b))
    return a @ b
"""
STEM, NORM = "nn.Module: Stem_0", "nn.Module: Norm_0"
TAIL = "<built-in method tail of Tensor object at 0x1>"
RELU = "torch/nn/functional.py(9): relu"


@pytest.mark.parametrize(
    ("function", "called", "lines"),
    [
        # by their order, whatever they are called; what else the function called are no modules
        ("loss(9)", [STEM, TAIL, NORM], [11, 10]),
        ("loss(9)", [STEM, NORM], [9]),  # tail() may be one
        ("loss(9)", [STEM, TAIL], [9, 11]),  # either of the two
        ("either(14)", [STEM] * 3, [17]),  # more calls of one than the lines outside of loops make
        ("either(14)", [STEM], [14]),
        ("train(20)", [STEM, "nn.Module: MSELoss_0"] * 2, [24, 25]),  # by what they were made of
        ("steps(28)", [RELU] * 3, [29, 31, 30]),
        ("steps(28)", [RELU] * 2, [28]),
    ],
)
def test_the_line_of_a_call_is_told_by_the_others_and_their_order(
    function: str, called: list[str], lines: list[int]
) -> None:
    name, line = function.rstrip(")").split("(")
    trace = Slices()
    frame = trace.add("python_function", f"train.py({line}): {name}", 0, 100)
    for number, callee in enumerate(called):
        below = trace.add("python_function", callee, 10 * number + 1, 5, parent=frame)
        trace.kernel(10 * number + 2, 10 - number, below=below)
    found = some(analyze(tables(trace), {"/home/user/project/train.py": MODULES}).device_lines)
    assert [row.place.line for row in found.lines] == lines


def test_operators_of_the_host_stand_in_where_there_is_no_device() -> None:
    trace = Slices()
    loss = trace.python("train.py(5): loss")
    outer = trace.add("cpu_op", "aten::linear", 0, 10, parent=loss, sequence=7, forward_thread=0)
    trace.events[outer]["self_ns"] = 4 * US
    trace.add("cpu_op", "aten::addmm", 2, 6, parent=outer, sequence=7, forward_thread=0)
    call = trace.python("torch/_tensor.py(500): backward", trace.python("train.py(40): step"))
    node = trace.add("cpu_op", "autograd::engine::evaluate_function: X", 50, 9, parent=call, sequence=7)
    trace.events[node] |= {"forward_thread": BACK_THREAD, "self_ns": 0, "forward": trace.events[outer]["id"]}
    trace.add("cpu_op", "aten::mm", 51, 9, parent=node)
    trace.add("cpu_op", "aten::add_", 70, 3, parent=trace.python("train.py(41): step"))

    found = lines_of(trace)

    assert found.basis == "cpu_op"
    assert places(found) == {("train.py", 5): 19, ("train.py", 41): 3}
    assert found.lines[0].via == {"direct": 10 * US, "sequence": 9 * US}


IDLE = (SYNC, COPY_IN, ALLOCATOR, LAUNCH, COMPILED, HOST)
WHOLE = (OPTIMIZER, ZERO_GRAD, LINALG, DATA_PARALLEL)  # own idle time and work


def idle_ns(found: DeviceLosses) -> float:
    """What all losses together tell of idle time and of copies from and to the host that nothing hides."""
    told = [one.details["idle_ns"] if one.kind in WHOLE else one.ns_per_step for one in found.losses]
    return sum(ns for one, ns in zip(found.losses, told, strict=True) if one.kind in (*IDLE, *WHOLE))


def losses(scene: Scene, *gpus: dict[str, Any]) -> DeviceLosses:
    (found,) = analyze(scene.tables(*gpus)).device_losses
    return found


def loss(scene: Scene, kind: str, *gpus: dict[str, Any]) -> Loss:
    return some(losses(scene, *gpus).of(kind))


def us(ns: float) -> float:
    return ns / 1000


def test_without_its_cause_no_idle_time_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def kinds_of(change: Callable[[dict[str, Any]], object]) -> list[list[str]]:
        gpu_traces.write(path, steps=3)
        path.write_text(
            json.dumps([row for row in json.loads(path.read_text())["traceEvents"] if change(row) != "out"])
        )
        return [[loss.kind for loss in found.losses] for found in open_run(path).analysis.device_losses]

    assert kinds_of(len) == [[SYNC, COPY_IN, LAUNCH]]
    assert kinds_of(lambda row: "out" if row.get("cat") == "cuda_runtime" else "") == [[COPY_IN]]
    assert kinds_of(lambda row: row.get("cat") == "kernel" and row.update(ts=row["ts"] - 5000)) == [[COPY_IN]]
    assert kinds_of(lambda row: "out" if row.get("cat") == "kernel" else "") == []


@pytest.mark.parametrize(
    "fill",
    [
        *(reads_value, batch_copies, allocations, host_work, short_launches),
        *(updates, zeros, compiled, decompositions, replicas),
    ],
)
def test_no_idle_time_is_told_twice(fill: Callable[[Scene], None]) -> None:
    scene = repeated(3, 10_000, fill)
    analysis = analyze(scene.tables())
    (found,) = analysis.device_losses
    assert analysis.views is not None
    assert 0 < idle_ns(found) <= idle_bound(some(analysis.views.spans[0].overview)) + 1


def idle_bound(overview: Overview) -> float:
    """Idle time and copies that nothing hides."""
    parts = [part for name, part in overview.parts.items() if name.startswith("idle_") or name == "exposed_copies"]
    return float(sum(part.mean_ns for part in parts))


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        (SGEMM, P100),
        (SGEMM, {**V100, "name": "AMD Instinct MI250X", "computeMajor": 9}),
        (TENSOR, V100),
        ("volta_dgemm_64x64_nn", V100),
        (ADD, V100),
    ],
)
def test_other_work_counts_for_nothing(name: str, gpu: dict[str, Any]) -> None:
    assert losses(repeated(2, 1000, lambda scene: products(scene, name)), gpu).of(MATRIX) is None


def test_of_a_run_of_pointwise_kernels_all_but_the_longest_count() -> None:
    found = loss(repeated(2, 1000, pointwise_run), POINTWISE)
    assert us(found.ns_per_step) == pytest.approx(400)
    assert us(found.details["runs_ns"]) == pytest.approx(500)


TILED = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_tn"
SIZES = st.integers(1, 5000)


@given(rows=SIZES, columns=SIZES, depth=SIZES, kernel=st.sampled_from([TILED, "gemm", "x" * 5000]))
def test_the_waste_is_a_part_and_nothing_for_whole_tiles(rows: int, columns: int, depth: int, kernel: str) -> None:
    assert 0 <= waste((rows, columns, depth), kernel) < 1
    assert waste((128 * rows, 128 * columns, MULTIPLE * depth), kernel) == 0


def batch(*shapes: str, op: str = "aten::linear") -> int | None:
    scene = Scene()
    scene.step(1000)
    short_launches(scene)
    for number, text in enumerate(shapes):
        scene.op(op, 900 + number, 0.5, shapes=text)
    return analyze(scene.tables()).device_losses[0].batch_size
