"""torch_xla's reports: metrics in milliseconds, the estimate of a step, the warnings in its own words, the facts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope import api
from tests.analyze.compilers.scenes import (
    compile_row,
    counter,
    growing,
    metric,
    percentiles,
    view,
    view_of,
    xla_compiles,
)
from tests.builders import MS, step_rows

XLA = Path(__file__).resolve().parents[4] / "shared" / "traces" / "torch_xla"
needs_xla = pytest.mark.skipif(not XLA.is_dir(), reason=f"the reports of torch_xla are not at {XLA}")
STEPS = counter("MarkStep", 15)
EXECUTIONS = metric("ExecuteTime", 30, 5e6)


def texts(*rows: dict[str, object], **tables: object) -> list[str]:
    return [warning.text for warning in view(counters=rows, **tables).warnings]


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"50": "fast", "x": 3, "90": null}', '{"50": '])
def test_percentiles_that_cannot_be_read_are_left_out(text: str) -> None:
    found = view(counters=[metric("CompileTime", 3, 6e6, percentiles=text)])
    assert found.metrics[0].percentiles == ()


def test_the_articles_lines() -> None:
    bad = (metric("CompileTime", 16, 5e9), metric("TransferFromDeviceTime", 30, 1e7), STEPS)
    assert texts(*bad) == [
        "CompileTime too frequent: 16 counts during 15 steps",
        "TransferFromDeviceTime too frequent: 30 counts during 15 steps",
    ]
    assert texts(metric("CompileTime", 1, 5e9), EXECUTIONS, STEPS) == []


def test_slow_compilations_and_executions() -> None:
    slow = metric("CompileTime", 1, 312e9, percentiles=percentiles({99: 312.003e9}))
    rest = metric("ExecuteTime", 1, 31e9, percentiles=percentiles({99: 30.5e9}))
    assert texts(slow, rest, STEPS) == [
        "CompileTime too slow: longest instance took 05m12s003ms000.000us",
        "ExecuteTime too slow: longest instance took 30s500ms000.000us",
    ]
    slow["percentiles"] = percentiles({99: 300e9})
    rest["percentiles"] = percentiles({99: 30e9})
    assert texts(slow, rest, STEPS) == []


def test_a_line_of_the_log_is_shown_instead_of_ours() -> None:
    def line(text: str, repeats: int) -> dict[str, object]:
        return {"kind": "xla_warning", "text": text, "repeats": repeats, "source": "bad.debug.log", "time_ns": None}

    journal = [
        line("pt-xla-profiler: TransferFromDeviceTime too frequent: 29 counts during 15 steps", 15),
        line("pt-xla-profiler: Something else entirely", 1),
    ]
    rows = [metric("CompileTime", 16, 5e9), metric("TransferFromDeviceTime", 30, 1e7), STEPS]
    warnings = view(counters=rows, journal=journal).warnings
    assert [(one.rule, one.text, one.verbatim, one.repeats) for one in warnings] == [
        ("too_frequent", "CompileTime too frequent: 16 counts during 15 steps", False, 0),
        ("too_frequent", "TransferFromDeviceTime too frequent: 29 counts during 15 steps", True, 15),
        ("other", "Something else entirely", True, 1),
    ]
    assert (warnings[1].count, warnings[1].steps, warnings[1].source) == (29, 15, "bad.debug.log")


def test_a_log_that_knows_steps_alone_does_not_make_counts_zero() -> None:
    rows = [row | {"duration_ns": None} for row in xla_compiles([2] + [1] * 14)]
    found = view(compiles=rows, counters=[STEPS])
    facts = found.backends[0]
    assert (facts.compiles, facts.compile_ms, facts.transfers, facts.marked_steps) == (16, None, None, 15)
    assert found.storms[0].whole_run
    assert [warning.text for warning in found.warnings] == ["CompileTime too frequent: 16 counts during 15 steps"]
    assert found.steps[0].compile_ms is None


def test_the_estimate_needs_rates_and_trusts_many_samples_of_executions_alone() -> None:
    steps = counter("MarkStep", 2000)
    assert view(counters=[EXECUTIONS, steps]).backends[0].step_estimate_ms is None
    busy = metric("LazyTracing", 90_000, 1e9, samples_per_second=1000.0)  # a ring of 1,024: seen for a second
    executions = metric("ExecuteTime", 2000, 1e9, samples_per_second=100.0)
    assert view(counters=[busy, steps]).backends[0].step_estimate_ms == pytest.approx(1.024e3 / 2000)
    assert view(counters=[busy, executions, steps]).backends[0].step_estimate_ms == pytest.approx(10)


def test_facts_of_torch_compile() -> None:
    rows = [
        compile_row(0, graph="0/0"),
        *growing(1, 3),
        compile_row(4, kind="failure", cause="unsupported"),
        {"step": 4, "kind": "graph_break", "cause": "unknown", "count": 2, "time_ns": None},
    ]
    journal = [{"kind": "compile_unknown", "what": "a message", "count": 3}]
    found = view(steps=step_rows(20), compiles=rows, journal=journal)
    (facts,) = found.backends
    assert (facts.compiles, facts.recompiles, facts.failures, facts.graph_breaks) == (4, 3, 1, 2)
    assert (facts.transfers, facts.marked_steps, facts.limit_hits) == (None, None, 0)
    assert facts.compile_ms == pytest.approx(20)
    assert facts.unknown == 5
    assert facts.source == "CompilationMetrics"
    assert facts.versions == ("torch 2.13.0+cpu",)
    assert any("5 events of torch.compile in a wording that is not known" in note for note in found.notes)


def test_untrusted_rows_do_not_stop_it() -> None:
    rows = [
        {"step": -5, "time_ns": -1, "duration_ns": -MS, "kind": "compile", "file": "", "line": -1},
        {"step": 10**15, "time_ns": 2**60, "duration_ns": 2**60, "kind": "recompile", "graph": "/"},
        {"step": None, "time_ns": None, "kind": "limit_hit", "graph": None, "function": None},
        {"kind": "mystery", "backend": "other", "reason": "\n\n"},
        {"kind": "compile", "direction": "backward", "graph": "9/9", "process": None, "rank": None},
    ]
    found = view(steps=step_rows(4), compiles=rows, counters=[metric("CompileTime", 0, 0.0, samples_per_second=0.0)])
    assert {facts.backend for facts in found.backends} == {"torch.compile", "torch_xla", "other"}


@needs_xla
@pytest.mark.parametrize("name", ["good", "bad", "item", "fallback"])
def test_the_estimated_step_of_a_real_report_is_near_the_measured_one(name: str) -> None:
    polled = json.loads((XLA / f"{name}.steps.json").read_text())
    measured_ms = sum(step["wall_s"] for step in polled) / len(polled) * 1e3
    found = view_of(api.open_run(XLA / f"{name}.metricsfile.txt").tables)
    assert found.backends[0].step_estimate_ms == pytest.approx(measured_ms, rel=0.15)
    assert found.backends[0].compiles == polled[-1]["metrics"]["CompileTime"]["total"]


@needs_xla
def test_the_lines_of_real_reports() -> None:
    found = {
        name: [warning.text for warning in view_of(api.open_run(XLA / f"{name}.stdout.txt").tables).warnings]
        for name in ("good", "bad", "item", "fallback")
    }
    assert found == {
        "good": [],
        "bad": [
            "CompileTime too frequent: 16 counts during 15 steps",
            "TransferFromDeviceTime too frequent: 30 counts during 15 steps",
        ],
        "item": ["TransferFromDeviceTime too frequent: 15 counts during 15 steps"],
        "fallback": [
            "TransferFromDeviceTime too frequent: 30 counts during 15 steps",
            "Op(s) not lowered: aten::median, aten::special_i0e",
        ],
    }
