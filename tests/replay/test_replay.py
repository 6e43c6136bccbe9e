"""`stepscope replay`: which calls can be made again, from any trace, and what becomes of a worker that ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.analyze.views.select import Selection
from stepscope.errors import EnvironmentRefusal, UsageError
from stepscope.model.replay import Variant
from stepscope.replay import runner
from stepscope.report import replays
from tests.cli.calls import call as command
from tests.gpu_traces import host

CPU, CUDA = Variant("cpu"), Variant("cuda")
FLOAT, LONG, SCALAR = "float", "long int", "Scalar"


def trace(folder: Path, *calls: tuple[str, list[Any], list[str], list[str]], strides: Any = None) -> Path:
    """A trace of torch.profiler with these calls: name, sizes, types and values of each argument."""
    events = [host("ProfilerStep#0", 0, 1000, "user_annotation")]
    for number, (name, sizes, types, values) in enumerate(calls):
        args: dict[str, Any] = {"Input Dims": sizes, "Input type": types, "Concrete Inputs": values}
        if strides is not None:
            args["Input Strides"] = strides
        events.append(host(name, 10 + 10 * number, 5, **args))
    path = folder / "worker.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def calls_of(path: Path, name: str) -> list[runner.Recorded]:
    rows = api.open_run(path).table("operators", Selection(group="shapes")).rows
    return runner.calls(rows, [path], runner.named(rows, name))[0]


def answers(path: Path, name: str, *variants: Variant, most: int = 2**26) -> list[dict[str, Any]]:
    """What the worker says, in this process."""
    torch = pytest.importorskip("torch")
    import msgspec

    from stepscope.replay import worker

    said: list[dict[str, Any]] = []
    calls = [{"arguments": msgspec.to_builtins(call.arguments)} for call in calls_of(path, name) if not call.reason]
    task = {"operator": name, "calls": calls, "seconds": 0.0, "max_bytes": most}
    with torch.no_grad():
        worker.replay(torch, {**task, "variants": [msgspec.to_builtins(each) for each in variants]}, said.append)
    return said


REPLAYED = {
    "linalg_qr": ([[2, 3, 3], []], ["c10::complex<float>", ""], ["", ""]),
    "linalg_cholesky": ([[4, 4], []], [FLOAT, SCALAR], ["", "False"]),
    "linalg_inv": ([[64, 64]], [FLOAT], [""]),
    "embedding": ([[3, 8], [4, 5], [], [], []], [FLOAT, LONG, SCALAR, SCALAR, SCALAR],
                  ["", "", "-1", "False", "False"]),
    "gather": ([[4, 2], [], [4, 9], []], [FLOAT, SCALAR, LONG, SCALAR], ["", "1", "", "False"]),
    "cross_entropy_loss": ([[8, 2], [8], [], [], [], []], [FLOAT, LONG, "", SCALAR, SCALAR, SCALAR],
                           ["", "", "", "1", "-100", "0."]),
    "mul": ([[4, 4], []], [FLOAT, "double"], ["", ""]),
    "add": ([[4], [4], []], [LONG, LONG, SCALAR], ["", "", "1"]),
    "sum": ([[4, 3], [], [], []], [FLOAT, "ScalarList", SCALAR, ""], ["", "[-1]", "False", ""]),
    "zeros": ([[], [], [], [], []], ["ScalarList", "", "", "", SCALAR], ["[2, 3]", "", "", "", "False"]),
}  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("name", REPLAYED)
def test_what_can_be_called_again_is(name: str, tmp_path: Path) -> None:
    said = answers(trace(tmp_path, (f"aten::{name}", *REPLAYED[name])), name, CPU, Variant("cpu", 1, "float64"))
    assert [each for each in said if "reason" in each] == []
    assert {each["variant"] for each in said} == {0, 1}
    assert all(each["seconds"] > 0 for each in said)


REFUSED = {
    "add_": ([[4], [4], []], [FLOAT, FLOAT, SCALAR], ["", "", "1"], "in place"),
    "cat": ([[[2], [2]], []], ["TensorList", SCALAR], ["", "0"], "list of tensors"),
    "scatter": ([[4], [], [4], []], [FLOAT, SCALAR, LONG, SCALAR], ["", "0", "", "1"], "integers"),
    "no_such_operator": ([[4]], [FLOAT], [""], "no operator of this name"),
    "relu": ([[4]], ["c10::quint8"], [""], "hold c10::quint8"),
    "sigmoid": ([[-4]], [FLOAT], [""], "no shapes"),
    "tanh": ([[2] * 40], [FLOAT], [""], "dimensions"),
    "neg": ([[2**39]], [FLOAT], [""], "more than replay may"),
    "ones": ([[], [], [], [], []], ["ScalarList", "", "", "", SCALAR], ["[1000000, 1000000]", "", "", "", "False"],
             "more than replay may"),
    "select": ([[4], [], []], [FLOAT, SCALAR, SCALAR], ["", "__import__('os').abort()", "0"], "form that is not known"),
    "expand": ([[1], [], []], [FLOAT, "ScalarList", SCALAR], ["", "[9] + [9]", "False"], "form that is not known"),
    "from_file": ([[], [], []], ["", "", ""], ["/etc/passwd", "", ""], "not recorded"),
    "narrow": ([[4], [], [], []], [FLOAT, SCALAR, SCALAR, SCALAR], ["", "0", "0", "99"], "RuntimeError"),
    "abs": ([[4], [4], [4], [4]], [FLOAT] * 4, [""] * 4, "do not fit"),
}  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_says_why_in_a_line(name: str, tmp_path: Path) -> None:
    *given, why = REFUSED[name]
    path = trace(tmp_path, (f"aten::{name}", *given))  # type: ignore[arg-type]
    reasons = [call.reason for call in calls_of(path, name) if call.reason]
    reasons += [each["reason"] for each in answers(path, name, CPU) if "reason" in each]
    assert len(reasons) == 1
    assert why in reasons[0]
    assert "\n" not in reasons[0]


@pytest.mark.torch
def test_inputs_have_the_recorded_strides_and_a_device_that_is_not_there_says_so(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from stepscope.replay import worker

    path = trace(tmp_path, ("aten::relu", [[4, 3]], [FLOAT], [""]), strides=[[1, 4]])
    call = worker.Call(torch, "relu", [{"type": FLOAT, "sizes": [4, 3], "strides": [1, 4], "value": ""}])
    assert call.made("cpu", None)[0][0].stride() == (1, 4)
    assert [argument.strides for argument in calls_of(path, "relu")[0].arguments] == [(1, 4)]
    if not torch.cuda.is_available():
        said = answers(path, "relu", CUDA, CPU)
        assert [each["reason"] for each in said if each["variant"] == 0] == ["not on this machine"]
        assert any("seconds" in each for each in said)


def test_of_many_shapes_those_that_take_the_most_are_replayed_and_layouts_are_counted(tmp_path: Path) -> None:
    shapes = [("aten::relu", [[size]], [FLOAT], [""]) for size in (1, 2, 3, 4, 5, 5)]
    path = trace(tmp_path, *shapes, ("aten::relu", [[5]], ["double"], [""]))
    rows = api.open_run(path).table("operators", Selection(group="shapes")).rows
    found, notes = runner.calls(rows, [path], "aten::relu")
    assert [(call.row.shapes, call.layouts) for call in found[:1]] == [("[[5]]", 2)]
    assert len(found) == runner.SHAPES
    assert notes == ["1 more lists of input shapes are left out, 14% of its time"]


def test_an_operator_that_is_not_there_or_none_of_torch_is_an_error_that_names_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = trace(tmp_path, ("aten::relu", [[4]], [FLOAT], [""]), ("MulBackward0", [[4]], [FLOAT], [""]))
    for name, why in (("sin", "aten::relu"), ("MulBackward0", "only PyTorch's own")):
        with pytest.raises(UsageError, match=why):
            calls_of(path, name)
    assert command("replay", path, "--op", "relu", "--devices", "tpu") == 2
    assert "--devices 'tpu': give cpu, cuda or cuda:N" in capfd.readouterr().err


def test_an_interpreter_that_only_the_run_names_is_not_started(tmp_path: Path) -> None:
    evil = tmp_path / "python"
    evil.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    evil.chmod(0o755)
    try:
        chosen = runner.interpreter(None, str(evil), {"PATH": ""})
    except EnvironmentRefusal as error:
        assert str(evil) in str(error)  # noqa: PT017 - without torch here
    else:
        assert chosen == sys.executable
    assert not (tmp_path / "started").exists()


def test_a_worker_that_dies_leaves_what_it_measured(tmp_path: Path) -> None:
    lines = [
        {"torch": "9.9", "gpus": ["Test GPU"]},
        *({"call": 0, "variant": 0, "seconds": 0.001 * number} for number in range(1, 10)),
    ]
    fake = tmp_path / "python"
    text = "\n".join(map(json.dumps, lines))
    fake.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nnot JSON\nEND\necho 'device-side assert' >&2\nkill -9 $$\n")
    fake.chmod(0o755)
    path = trace(tmp_path, ("aten::relu", [[4]], [FLOAT], [""]))
    calls = calls_of(path, "relu")
    found = runner.replay(runner.Task("aten::relu", (CPU, CUDA), 1.0, "2.9"), calls, str(fake))
    cpu, cuda = found.calls[0].times
    assert (cpu.per_call_ns, cpu.per_step_ns, cpu.rounds, cpu.ratio) == (5e6, 5e6, 9, 1.0)
    assert (cpu.low_ns, cpu.high_ns) == (2e6, 8e6)  # the second and the eighth of nine: 96.1 %
    assert cuda.reason is not None
    assert "signal 9; device-side assert" in cuda.reason
    assert [step.variant for step in found.steps] == [CPU]
    assert "trained with torch 2.9" in found.notes[0]
    kept = replays.keep(tmp_path, found)
    assert kept is not None
    assert replays.kept(tmp_path) == (found,)
    kept.write_text('{"schema": "stepscope.replay/1", "replays": [{"operator": 7}]}')
    assert replays.kept(tmp_path) == ()


def test_the_interval_of_a_median_needs_six_values() -> None:
    assert runner.interval([1.0] * 5) == (None, None)
    assert runner.interval([3, 1, 2, 6, 5, 4]) == (1, 6)  # 96.9 %
    assert runner.interval(list(range(1, 26))) == (8, 18)  # 95.7 %


def test_a_finding_that_names_the_operator_or_its_line_has_the_figures_first() -> None:
    place = {"file": "/x/flow.py", "line": 23, "function": "haar_qr"}
    variants = [{"device": "cpu", "threads": 1, "dtype": None}, {"device": "cuda", "threads": None, "dtype": None}]
    steps = [{"variant": variants[0], "per_step_ns": 2e6}, {"variant": variants[1], "per_step_ns": 2e8}]
    replay = {"operator": "aten::linalg_qr", "place": place, "gpus": ["Test GPU"], "steps": steps}
    named = {"title": "aten::linalg_qr on the GPU is serial", "where": [], "evidence": []}
    at_line = {"title": "a line", "where": [place], "evidence": []}
    other = {"title": "a line", "where": [{**place, "line": 24}], "evidence": [{"metric": "aten::mm"}]}
    for finding in (named, at_line):
        told = [(row["metric"], row["value"], row["unit"]) for row in replays.evidence(finding, [replay])]
        assert told == [
            ("aten::linalg_qr alone on cpu, 1 thread", 2.0, "ms"),
            ("aten::linalg_qr alone on cuda, Test GPU", 200.0, "ms"),
        ]
    assert replays.evidence(other, [replay]) == []
