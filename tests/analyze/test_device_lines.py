"""Device time by line: exclusively, in both directions, with a reason for what has none."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import CodeOptions, analyze
from stepscope.analyze.device.device_time import (
    EARLY,
    ENGINE,
    LIBRARIES,
    NO_FORWARD,
    NO_LAUNCH,
    REPLAYED,
)
from stepscope.model import DeviceLine, DeviceLines
from tests.analyze.traces import BACK_THREAD, US, Slices, tables
from tests.records import some

FOREIGN: dict[str, Any] = {"run": {"user_roots": (), "hosts": ()}, "ranks": ()}
LINEAR = "torch/nn/modules/linear.py(120): forward"
STACK = (
    "/opt/conda/lib/python3.7/site-packages/torch/nn/functional.py(2263): batch_norm;"
    "/opt/conda/lib/python3.7/site-packages/torchvision/models/resnet.py(125): forward;train.py(46): <module>"
)


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


def backward_trace(*, forward: bool = True, custom: bool = False) -> Slices:
    """A kernel below an operator of the backward pass, which runs below `loss.backward()`."""
    trace = Slices()
    loss = trace.python("train.py(5): loss")
    ahead = trace.add("cpu_op", "aten::mul", parent=trace.python(LINEAR, loss), sequence=7, forward_thread=0)
    call = trace.python("torch/_tensor.py(500): backward", trace.python("train.py(40): step"))
    node = trace.add(
        "cpu_op",
        "autograd::engine::evaluate_function: MulBackward0",
        100,
        parent=call,
        sequence=7,
        forward_thread=BACK_THREAD,
    )
    below = trace.python("train.py(60): backward", node) if custom else node
    operator = trace.add("cpu_op", "aten::mul", 100, parent=below)
    link = {"forward": ahead, "forward_method": "sequence"} if forward else {}
    trace.kernel(110, 10, below=operator, operator=operator, **link)
    return trace


@pytest.mark.parametrize(
    ("made", "line", "via"),
    [
        ({}, 5, "sequence"),
        ({"forward": False}, 40, "direct"),  # without its forward operator: to the call of backward
        ({"custom": True}, 60, "direct"),  # a backward function of the user's own
    ],
)
def test_a_backward_kernel_belongs_to_the_line_of_its_forward_operator(
    made: dict[str, bool], line: int, via: str
) -> None:
    found = only(lines_of(backward_trace(**made)))
    assert (found.place.file, found.place.line, found.via) == ("train.py", line, {via: 10 * US})


def test_call_stacks_of_old_traces_give_exact_lines_in_both_directions() -> None:
    trace = Slices()
    outer = trace.add("Operator", "aten::batch_norm", call_stack=STACK, sequence=3, forward_thread=0)
    inner = trace.add("Operator", "aten::cudnn_batch_norm", parent=outer)
    trace.kernel(0, 10, below=inner)
    node = trace.add("Operator", "CudnnBatchNormBackward", 50, sequence=3, forward_thread=BACK_THREAD)
    trace.kernel(50, 20, below=node, forward=inner, forward_method="flow")

    line = only(lines_of(trace))

    assert (line.place.file, line.place.line, line.place.function) == ("train.py", 46, "<module>")
    assert line.via == {"flow": 20 * US, "direct": 10 * US}
    assert line.exact_line


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
        ("torch/nn/functional.py(9): linear", 5, 4, True),  # ran when the recording began: the line it was at
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


INSTALLED = "/venv/lib/python3.11/site-packages/mine"


@pytest.mark.parametrize(
    ("file", "options", "expected"),
    [
        ("vendor/fast.py", CodeOptions(), "vendor/fast.py"),
        ("vendor/fast.py", CodeOptions(libraries=("vendor",)), "train.py"),
        ("vendor/fast.py", CodeOptions(libraries=("vend",)), "vendor/fast.py"),  # whole components only
        ("vendor/fast.py", CodeOptions(maps=(("vendor", "/src/vendor"),)), "/src/vendor/fast.py"),
        ("vendor/fast.py", CodeOptions(source_roots=("/src",), files=("/src/vendor/fast.py",)), "/src/vendor/fast.py"),
        (f"{INSTALLED}/a.py", CodeOptions(source_roots=(INSTALLED,)), f"{INSTALLED}/a.py"),
        ("/home/me/vllm/serve.py", CodeOptions(), "/home/me/vllm/serve.py"),
        ("/build/x/a.py", CodeOptions(maps=(("/build", "/wrong"), ("/build/x", "/home/me"))), "/home/me/a.py"),
        ("transformers/mine.py", CodeOptions(source_roots=("transformers",)), "transformers/mine.py"),
    ],
)
def test_what_is_the_users_can_be_said(file: str, options: CodeOptions, expected: str) -> None:
    trace = Slices()
    frame = trace.python(f"{file}(3): go", trace.python("train.py(1): <module>"))
    trace.kernel(0, 10, below=frame)
    assert only(lines_of(trace, options=options)).place.file == expected
