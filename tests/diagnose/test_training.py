"""Rules on the health of what is trained: each fires where it should, and stays silent on a healthy run and without
its series."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import Diagnosis
from tests.builders import MS, T0, make_tables, step_rows

COUNT = 100
LINE = {"file": "/home/user/project/train.py", "line": 31, "function": "main"}


def rows(name: str, source: str, value: Callable[[int], float]) -> list[dict[str, Any]]:
    return [
        {"name": name, "source": source, "step": step, "time_ns": T0 + 10 * step * MS + MS, "value": value(step)}
        for step in range(COUNT)
    ]


def judged(*series: list[dict[str, Any]], journal: Any = (), fetches: int = 4) -> Diagnosis:
    metrics = [row for own in series for row in own]
    steps = step_rows(COUNT, fetches=fetches)
    return diagnose(analyze(make_tables(steps=steps, metrics=metrics, journal=list(journal))))


def told(*series: list[dict[str, Any]], journal: Any = (), fetches: int = 4) -> list[tuple[str, str]]:
    """(rule, severity) of what the rules on training say."""
    found = judged(*series, journal=journal, fetches=fetches)
    assert all(one.evidence and one.fix and one.caveat and one.falsified_by for one in found.risks)
    assert all(finding.category != "training" for finding in found.findings)
    return [(risk.rule.removeprefix("training."), risk.severity) for risk in found.risks]


def passes(number: int, *, divided: bool = False, last: int = 1) -> list[dict[str, Any]]:
    """A loss near 1 of updates of several passes; as the table has it, their mean where nothing divides them."""

    def mean(step: int) -> float:
        return 1 + 0.01 * (step % 7)

    count = {step: number if step % 10 else last for step in range(COUNT)}
    total = rows("train/loss_sum", "backward", lambda step: mean(step) * count[step])
    own = rows("train/loss", "backward", lambda step: mean(step) * (count[step] if divided else 1))
    return [*own, *total, *rows("train/loss_mean", "backward", mean)]


def root(node: str, **more: Any) -> list[dict[str, Any]]:
    about = {"name": "train/loss", "source": "backward", "node": node, "values": COUNT, **more}
    return [{"kind": "metric_series", **about, **LINE}]


def test_a_loss_that_is_not_divided() -> None:
    assert told(passes(4, last=4), journal=root("MeanBackward0")) == [("loss_not_divided", "warning")]
    (risk,) = judged(passes(4, last=4), journal=root("MeanBackward0")).risks
    assert risk.title == (
        "The loss is not divided by the 4 backward passes of an update: gradients are 4 times those of their mean "
        "(train.py:31)"
    )
    assert [place.line for place in risk.where] == [31]
    assert told(passes(4, last=2)) == [("loss_not_divided", "warning")]  # the last update of an epoch has fewer


def test_a_loss_that_is_divided_or_whose_passes_are_not_of_one_number() -> None:
    assert told(passes(4, divided=True, last=4)) == []
    assert told(passes(4, last=4), journal=root("MulBackward0")) == []  # by something else
    assert told(passes(4, last=4), journal=root("MeanBackward0", scaled=True)) == []  # a pipeline scales gradients
    # several losses of one batch, and those of an episode's moments, may be meant to be added
    assert told(passes(4, last=4), journal=root("MeanBackward0"), fetches=1) == []
    assert told(passes(4, last=4), journal=root("NegBackward0"), fetches=0) == []
    assert told(passes(4, last=4), journal=root("NllLossBackward0"), fetches=0) == [("loss_not_divided", "warning")]
    uneven = passes(4)
    for row in uneven:
        if row["name"] == "train/loss_sum" and row["step"] % 2:
            row["value"] /= 2
    assert told(uneven) == []


def test_a_loss_beside_what_the_script_logs() -> None:
    """The root of a pass is divided by what is known on a device alone; or logged after it was divided."""

    def logged(of: float) -> list[dict[str, Any]]:
        shifted = rows("train/loss", "wandb", lambda step: (1 + 0.01 * (step % 7)) * of)
        return [{**row, "time_ns": row["time_ns"] + MS} for row in shifted]

    (risk,) = judged(passes(4, last=4), logged(1.0), journal=root("MulBackward0")).risks
    assert (risk.rule, risk.confidence) == ("training.loss_not_divided", "high")
    assert {one.metric: one.value for one in risk.evidence}[
        "sum of an update's losses by what is logged as train/loss (wandb)"
    ] == pytest.approx(4, rel=0.02)
    (risk,) = judged(passes(4, divided=True, last=4), logged(1.0), journal=root("DivBackward0")).risks
    assert (risk.rule, risk.severity) == ("training.logged_loss", "info")
    assert told(passes(4, divided=True, last=4), logged(4.0), journal=root("DivBackward0")) == []
    validated = [{**row, "name": "val/loss"} for row in logged(1.0)]
    assert told(passes(4, divided=True, last=4), validated, journal=root("DivBackward0")) == []


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(60, COUNT, [("loss_not_finite", "critical")]), (60, 61, [("loss_not_finite", "warning")]), (COUNT, COUNT, [])],
)
def test_a_loss_that_is_not_finite(first: int, last: int, expected: list[tuple[str, str]]) -> None:
    assert told(rows("train/loss", "backward", lambda step: math.nan if first <= step < last else 1.0)) == expected


def test_what_the_script_alone_logs_is_no_risk() -> None:
    assert told(rows("val/loss", "log", lambda _: math.nan)) == []


@pytest.mark.parametrize(
    ("norm", "expected"),
    [(5.0, [("clipping", "info")]), (1.2, []), (0.5, [])],
)
def test_clipping_in_nearly_every_update(norm: float, expected: list[tuple[str, str]]) -> None:
    norms = rows("train/grad_norm", "clipping", lambda _: norm)
    assert told(norms, rows("train/grad_norm_clipped", "clipping", lambda _: min(norm, 1.0))) == expected


@pytest.mark.parametrize(
    ("least", "skipped", "expected"),
    [
        (2.0**-4, (), [("scale_collapse", "critical")]),
        (2.0**10, range(30, 40), [("scale_collapse", "warning")]),
        (2.0**10, range(16), []),  # the search for a scale
        (2.0**10, (50,), []),
    ],
)
def test_a_scaler_without_a_scale(least: float, skipped: range, expected: list[tuple[str, str]]) -> None:
    scale = rows("train/scale", "scaler", lambda step: least if step > 50 else 2.0**10)
    journal = [{"kind": "scaler_skip", "step": step, "time_ns": T0 + 10 * step * MS + MS} for step in skipped]
    assert told(scale, journal=journal) == expected


def test_dead_units_and_updates_of_the_wrong_size() -> None:
    zeros = [*rows("watch/zeros/a", "watch", lambda _: 0.99), *rows("watch/zeros/b", "watch", lambda _: 0.6)]
    assert told(zeros) == [("dead_units", "warning")]
    assert "1 of 2 modules return zeros in 99% of their outputs or more" in judged(zeros).risks[0].title
    early = rows("watch/zeros/a", "watch", lambda step: 0.99 if step < 50 else 0.5)
    assert told(early) == []
    ratios = {"a.weight": 0.5, "a.bias": 0.5, "b.weight": 1e-3, "c.weight": 1e-8}
    series = [
        rows(f"watch/update_ratio/{name}", "watch", lambda _, value=value: value) for name, value in ratios.items()
    ]
    assert told(*series) == [("update_ratio", "warning"), ("update_ratio", "info")]
    assert told(series[2]) == []


def test_a_healthy_run_and_one_without_series() -> None:
    healthy = rows("train/loss", "backward", lambda step: 2 / (1 + step) + 0.01 * (step % 7))
    found = judged(healthy)
    assert found.risks == ()
    quiet = {row.rule: row.quiet for row in diagnose(analyze(make_tables(steps=step_rows(COUNT)))).abstained}
    assert {name for name in quiet if name.startswith("training.") and quiet[name]} == {
        f"training.{name}"
        for name in (
            *("loss_not_finite", "loss_not_divided", "logged_loss", "clipping", "scale_collapse"),
            *("dead_units", "update_ratio"),
        )
    }


def sampled(*below: tuple[str, int], waiting: bool = False) -> Diagnosis:
    """Of a loop that stands in a model, and for a fifth of its samples in each of these below the script's line 40."""
    train = f"main ({LINE['file']}:40)"
    stacks = [
        {"frames": [train, frame], "samples": count, "waiting": waiting, "phase": "other"} for frame, count in below
    ]
    stacks.append({"frames": [f"main ({LINE['file']}:20)", "linear (torch/nn/functional.py:9)"], "samples": 400})
    stacks[-1]["phase"] = "forward"
    return diagnose(analyze(make_tables(steps=step_rows(500), stacks=stacks)))


@pytest.mark.parametrize(
    ("file", "tool"),
    [
        ("site-packages/wandb/integration/torch/wandb_torch.py", "wandb.watch"),
        ("site-packages/wandb/sdk/wandb_run.py", "W&B"),
        ("site-packages/torch/utils/tensorboard/writer.py", "TensorBoard"),
        ("site-packages/lightning/pytorch/callbacks/throughput_monitor.py", "Lightning's ThroughputMonitor"),
    ],
)
def test_a_logging_tool_is_named_with_the_line_that_calls_it(file: str, tool: str) -> None:
    found = sampled((f"log (/usr/lib/python3/{file}:70)", 100), waiting=True)
    (finding,) = (one for one in found.findings if one.rule == "host.logging")
    assert finding.title.startswith(f"Logging with {tool} takes ")
    assert finding.title.endswith("of the step, mostly waiting: log (train.py:40)")
    assert [place.line for place in finding.where] == [40]
    # nobody tells the same time as Python of that line
    assert [one for one in found.findings if one.rule == "host.python_on_critical_path"] == []


def test_logging_that_costs_little_and_a_script_of_such_a_name_are_no_finding() -> None:
    for found in (
        sampled(("log (/usr/lib/python3/site-packages/wandb/sdk/wandb_run.py:70)", 4)),
        sampled(("log (/home/user/project/wandb/mine.py:70)", 100)),
    ):
        assert [one for one in found.findings if one.rule == "host.logging"] == []


@pytest.mark.parametrize(("at", "lines"), [(80, [[7]]), (70, [])])
def test_what_a_module_calls_at_another_line_than_forward_passes_is_a_hook(at: int, lines: list[list[int]]) -> None:
    main, module = f"main ({LINE['file']}:40)", "_call_impl (/venv/lib/site-packages/torch/nn/modules/module.py"
    ways = ((f"{module}:70)", "Net.forward", 300), (f"{module}:{at})", "record", 200))
    stacks = [
        {"frames": [main, way, f"{name} ({LINE['file']}:7)"], "samples": samples, "phase": "forward"}
        for way, name, samples in ways
    ]
    found = diagnose(analyze(make_tables(steps=step_rows(500), stacks=stacks))).findings
    assert [[place.line for place in one.where] for one in found if one.rule == "host.logging"] == lines


def test_anomaly_detection_that_was_left_on_is_told() -> None:
    found = sampled(("format_stack (/venv/lib/python3.11/site-packages/torch/fx/traceback.py:497)", 100))
    (finding,) = found.findings
    assert finding.rule == "host.anomaly_detection"
    assert finding.where[0].line == 40
    assert finding.share == pytest.approx(0.2, abs=0.05)


def test_tensors_that_are_written_as_text_are_python() -> None:
    torch = "/venv/lib/python3.11/site-packages/torch"
    written, computed = (
        sampled((f"{function} ({torch}/_tensor.py:570)", 100)) for function in ("Tensor.__repr__", "Tensor.__rpow__")
    )
    assert [one.rule for one in written.findings] == ["host.python_on_critical_path"]
    assert computed.findings == ()
