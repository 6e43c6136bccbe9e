"""What compilers did: causes and their lines, checks, what compiling took of the steps, storms, torch_xla's reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope import api
from stepscope.analyze.compilers import CHECKS, checks
from stepscope.model import Place
from stepscope.model.compilers import Change, CompilerCause, CompilerCheck, CompilerSteps, CompilersView, CompileStorm
from tests.analyze.compilers.scenes import (
    TORCH,
    TRAIN,
    Row,
    compile_row,
    counter,
    growing,
    metric,
    percentiles,
    view,
    view_of,
    xla_compiles,
    xla_counters,
)
from tests.builders import MS, T0, step_rows


def one(causes: tuple[CompilerCause, ...], kind: str) -> CompilerCause:
    (found,) = [cause for cause in causes if cause.kind == kind]
    return found


def test_a_growing_dimension_is_one_cause_with_its_values_in_order() -> None:
    rows = growing(1, 5)
    cause = one(view(steps=step_rows(20), compiles=[compile_row(0), *reversed(rows)]).causes, "recompile")
    assert cause.count == 5
    assert cause.steps == (1, 2, 3, 4, 5)
    assert (cause.first_step, cause.last_step, cause.step_count) == (1, 5, 5)
    assert cause.subject == "x.size(0)"
    assert cause.changes[0] == Change(1, "8", "12", "x.size(0)")
    assert [change.new for change in cause.changes] == ["12", "16", "20", "24", "28"]
    assert (cause.cache_entries, cause.limit) == (5, 8)
    assert cause.text == "tensor 'x' size mismatch at index 0. expected 24, actual 28"
    assert cause.total_ms == pytest.approx(20)
    assert cause.longest_ms == pytest.approx(4)
    assert cause.in_main_steps_ms == pytest.approx(20)
    assert cause.kinds == ("train",)


def test_the_line_to_blame_is_the_users() -> None:
    named = compile_row(1, kind="recompile", cause="constant", file=TRAIN, line=18)
    in_torch = compile_row(2, kind="recompile", cause="shape", file=TORCH, line=5)
    uncalled = compile_row(3, kind="recompile", cause="shape", call_file=None, call_line=None)
    nowhere = compile_row(4, kind="recompile", cause="shape", call_file=None, def_file=TORCH, def_line=7)
    causes = {c.first_step: c for c in view(steps=step_rows(9), compiles=[named, in_torch, uncalled, nowhere]).causes}
    assert causes[1].place == Place(TRAIN, 18)
    assert causes[2].place == Place(TRAIN, 40) == causes[2].call
    assert causes[3].place == Place(TRAIN, 12, "forward") == causes[3].definition
    assert causes[4].place is None
    assert causes[4].definition == Place(TORCH, 7, "forward")


def test_ids_stay_the_same_on_another_machine_and_with_other_times() -> None:
    def ids(file: str, ms: float, more: list[Row]) -> set[str]:
        rows = [row | {"file": file, "line": 18} for row in growing(1, 3)]
        rows = [row | {"duration_ns": round(ms * MS)} for row in rows]
        return {cause.id for cause in view(steps=step_rows(9), compiles=[*rows, *more]).causes}

    here = ids(TRAIN, 4, [])
    assert len(here) == 1
    assert here == ids("/home/user/project/src/train.py", 1, [])
    assert here < ids(TRAIN, 4, [compile_row(0)])
    assert not here & ids("/home/user/project/other.py", 4, [])


def test_a_limit_hit_takes_function_and_line_of_the_recompilations_before_it() -> None:
    line: Row = {"cause": "int_attribute", "subject": "s.calls", "file": TRAIN, "line": 18}
    other = compile_row(8, kind="recompile", cause="shape", graph="1/7", function="other", file=TRAIN, line=99)
    hit = {"step": 9, "kind": "limit_hit", "graph": "2/8", "cause": "int_attribute", "limit": 8, "duration_ns": MS}
    rows = [compile_row(n, kind="recompile", graph=f"2/{n}", **line) for n in range(1, 8)]
    cause = one(view(steps=step_rows(20), compiles=[*rows, other, hit | {"time_ns": T0 + 90 * MS}]).causes, "limit_hit")
    assert cause.place == Place(TRAIN, 18)
    assert (cause.function, cause.subject, cause.limit) == ("forward", "s.calls", 8)
    assert cause.definition == Place(TRAIN, 12, "forward")


def test_a_limit_hit_of_another_cause_takes_no_line_from_it() -> None:
    before = compile_row(
        1, kind="recompile", graph="2/1", cause="int_attribute", subject="s.calls", file=TRAIN, line=18
    )
    hit = {"step": 9, "kind": "limit_hit", "graph": "2/8", "cause": "shape", "subject": "x.size(0)"}
    cause = one(view(steps=step_rows(20), compiles=[before, hit | {"time_ns": T0 + 90 * MS}]).causes, "limit_hit")
    assert (cause.function, cause.subject) == ("forward", "x.size(0)")
    assert cause.place == Place(TRAIN, 40)


def test_the_reason_is_told_without_what_other_fields_hold() -> None:
    reason = "2/7: s.calls == 7           # s.calls += 1  # train.py:18 in forward (HINT: make it a tensor)\nmore"
    (cause,) = view(steps=step_rows(9), compiles=[compile_row(1, kind="recompile", reason=reason)]).causes
    assert cause.text == "s.calls == 7"


def check(name: str, found: CompilersView | None, recorded: bool = False) -> CompilerCheck:
    (result,) = checks(found, [name], recorded=recorded)
    assert result.name == name
    assert result.judged or not result.failed
    return result


def test_recompilations_fail_with_their_line() -> None:
    found = view(steps=step_rows(20), compiles=[compile_row(0), *growing(1, 3, file=TRAIN, line=18)])
    result = check("recompile", found)
    assert result.failed
    assert result.place == Place(TRAIN, 18)
    assert result.text.startswith("3 recompilations, the first in step 1; tensor 'x' size mismatch")
    assert "\n" not in result.text


def test_a_limit_hit_fails_and_speaks_first() -> None:
    hit = compile_row(8, kind="limit_hit", cause="int_attribute", reason="s.calls == 7", file=TRAIN, line=30, limit=8)
    result = check("recompile", view(steps=step_rows(20), compiles=[*growing(1, 1), hit]))
    limit = "1 refused at the limit of compiled versions"
    assert (result.text, result.place) == (
        f"1 recompilation, {limit}, the first in step 1; s.calls == 7",
        Place(TRAIN, 30),
    )


def test_graph_breaks_fail() -> None:
    broken = {"step": 0, "kind": "graph_break", "cause": "item", "reason": "Tensor.item()", "file": TRAIN, "line": 7}
    found = view(steps=step_rows(20), compiles=[compile_row(0), broken])
    result = check("graph-break", found)
    assert (result.failed, result.place) == (True, Place(TRAIN, 7))
    assert result.text == "1 graph break, the first in step 0; Tensor.item()"
    assert not check("recompile", found).failed


@pytest.mark.parametrize(
    ("per_step", "failed", "judged", "text"),
    [
        ([2] + [1] * 14, True, True, "CompileTime too frequent: 16 counts during 15 steps"),
        (
            [1] + [0] * 99 + [1] * 20,
            *(True, True, "torch_xla compiled again and again from step 102 on, after warm-up"),
        ),
        ([1] + [0] * 14, False, True, "torch_xla compiled 1 graph in 15 steps: too few for a storm"),
        ([1] * 5, False, False, "no source of this run tells recompilations from first compilations"),
    ],
)
def test_torch_xla_fails_by_a_storm_and_needs_enough_steps(
    per_step: list[int], failed: bool, judged: bool, text: str
) -> None:
    counters = xla_counters(per_step, step=len(per_step) - 1)
    result = check("recompile", view(compiles=xla_compiles(per_step), counters=counters))
    assert (result.failed, result.judged, result.text) == (failed, judged, text)


def test_what_no_source_tells_is_not_judged() -> None:
    spans = view(steps=step_rows(20), compiles=[compile_row(0, source="trace")])
    for name in CHECKS:
        assert not check(name, spans).judged
        assert not check(name, spans, recorded=True).judged
        assert not check(name, None).judged


def test_a_recording_without_compilations_passes() -> None:
    for name in CHECKS:
        result = check(name, None, recorded=True)
        assert (result.failed, result.judged, result.text) == (False, True, "torch.compile was not used")
    transfers = view(steps=step_rows(20), compiles=[{"step": 1, "kind": "transfer", "backend": "cuda"}])
    for name in CHECKS:
        assert check(name, transfers, recorded=True).judged
        assert not check(name, transfers).judged


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="there are recompile, graph-break"):
        checks(None, ["recompiles"])


def of_kind(found: CompilersView, kind: str = "train") -> CompilerSteps:
    (steps,) = [steps for steps in found.steps if steps.kind == kind]
    return steps


def test_nested_and_overlapping_rows_count_once() -> None:
    rows = [
        compile_row(2, ms=6, at_ms=1),
        compile_row(2, ms=2, at_ms=2, function="inner"),
        compile_row(2, ms=4, at_ms=5, function="other"),
    ]
    steps = of_kind(view(steps=step_rows(20), compiles=rows))
    assert steps.compile_ms == pytest.approx(8)
    assert steps.wall_ms == pytest.approx(200)
    assert steps.share == pytest.approx(0.04)
    assert (steps.steps, steps.compiling_steps, steps.compiles) == (20, 1, 3)


def test_kinds_are_apart_and_each_has_its_own_warm_up() -> None:
    train = step_rows(30)
    evaluation = step_rows(12, first_step=30, start_ns=T0 + 300 * MS, kind="eval")
    rows = [compile_row(0), *(compile_row(step, kind="recompile", cause="shape") for step in range(31, 42))]
    found = view(steps=train + evaluation, compiles=rows)
    assert [steps.kind for steps in found.steps] == ["train", "eval"]
    assert (of_kind(found).compiling_steps, of_kind(found).recompiles) == (1, 0)
    evals = of_kind(found, "eval")
    assert (evals.compiling_steps, evals.recompiles) == (11, 11)
    assert evals.share == pytest.approx(44 / 120)
    assert evals.late_compile_ms == pytest.approx(8)
    assert evals.late_wall_ms == pytest.approx(20)
    assert evals.late_share == pytest.approx(0.4)
    assert of_kind(found).late_share == 0
    assert {cause.kind: cause.kinds for cause in found.causes} == {"compile": ("train",), "recompile": ("eval",)}


def test_steps_of_a_report_are_estimated_by_its_rates() -> None:
    per_step = [2] + [1] * 14
    found = view(compiles=xla_compiles(per_step), counters=xla_counters(per_step, step=14))
    steps = of_kind(found)
    assert steps.estimated
    assert (steps.steps, steps.compiling_steps, steps.compiles) == (15, 15, 16)
    assert steps.wall_ms == pytest.approx(7500)
    assert steps.share == pytest.approx(4800 / 7500)
    assert steps.late_compile_ms == pytest.approx(1500)
    assert (steps.recompiles, steps.breaks) == (None, None)
    assert found.backends[0].step_estimate_ms == pytest.approx(500)
    assert [point.compiles for point in found.points] == per_step
    assert {point.wall_ms for point in found.points} == {None}


def test_a_long_run_keeps_the_points_that_recompiled() -> None:
    count = 1500
    rows: list[dict[str, Any]] = [compile_row(step, ms=1) for step in range(count)]
    recompiled = {7, 700, 1499}
    for step in recompiled:
        rows[step]["kind"] = "recompile"
    points = view(steps=step_rows(count), compiles=rows).points
    assert len(points) == 500
    assert recompiled <= {point.step for point in points}
    assert [point.step for point in points] == sorted(point.step for point in points)


def test_steps_after_the_limit_are_compared_with_those_before_it() -> None:
    rows = step_rows(40)
    for row in rows[:9]:
        row["wall_ns"] = 100 * MS
    start = T0
    for row in rows:
        row["start_ns"] = start
        start += row["wall_ns"]
    compiles = [row | {"time_ns": T0 + (step * 100 + 1) * MS} for step, row in enumerate(growing(0, 8), 0)]
    for row in compiles:
        row["duration_ns"] = 94 * MS
    hit = compile_row(8, ms=90, kind="limit_hit", limit=8) | {"time_ns": T0 + 801 * MS}
    found = view(steps=rows, compiles=[*compiles, hit])
    (limit,) = found.limits
    assert limit.cause == next(cause.id for cause in found.causes if cause.kind == "limit_hit")
    assert limit.step == 8
    assert limit.before_compiling
    assert (limit.before_ms, limit.before_steps) == pytest.approx((6, 7))
    assert (limit.after_ms, limit.after_steps) == pytest.approx((10, 31))


event = st.tuples(
    st.integers(0, 9), st.floats(0, 25), st.floats(0, 25), st.sampled_from(["compile", "recompile", "limit_hit"])
)


@settings(deadline=None, max_examples=60)  # a busy machine is no failure
@given(st.lists(event, max_size=10), st.integers(1, 9))
def test_shares_are_shares_and_parts_add_up(drawn: list[tuple[int, float, float, str]], evals: int) -> None:
    rows = step_rows(10)
    for row in rows[10 - evals :]:
        row["kind"] = "eval"
    compiles = [compile_row(step, at_ms=at, ms=ms, kind=kind) for step, at, ms, kind in drawn]
    found = view(steps=rows, compiles=[compile_row(0), *compiles])
    assert sum(steps.steps for steps in found.steps) == 10
    for steps in found.steps:
        assert steps.share is not None
        assert 0 <= steps.share <= 1
        assert steps.compile_ms is not None
        assert steps.wall_ms is not None
        assert steps.compile_ms <= steps.wall_ms + 1e-9
        assert steps.compiling_steps is not None
        assert 0 <= steps.compiling_steps <= steps.steps
    inside = sum(steps.compile_ms or 0 for steps in found.steps)
    assert inside == pytest.approx(found.backends[0].in_steps_ms)
    assert inside == pytest.approx(sum(point.compile_ms or 0 for point in found.points))
    assert sum(steps.compiles for steps in found.steps) == sum(point.compiles for point in found.points)


def test_copies_that_traces_tell_are_per_traced_step() -> None:
    rows = step_rows(40)
    for row in rows[10:14]:
        row["in_window"] = True
    copies = [
        {"step": step, "kind": "transfer", "backend": "cuda", "count": 3, "source": "trace: Memcpy DtoH"}
        for step in range(10, 14)
    ]
    events = [{"step": step} for step in range(10, 14)]
    found = view(steps=rows, compiles=copies, events=events)
    steps = of_kind(found)
    assert (steps.backend, steps.steps, steps.transfers) == ("cuda", 4, 12)
    assert (found.backends[0].transfers, found.backends[0].recompiles) == (12, None)
    assert found.storms == ()
    assert any("only the steps these cover" in note for note in found.notes)


BAD = [2] + [1] * 14
GOOD = [1] + [0] * 14
BURST = [1] * 9 + [0] * 31
LATE = [1] + [0] * 99 + [1] * 40


def live(per_step: list[int]) -> CompileStorm:
    """The sequence as a recording with steps has it."""
    rows = step_rows(len(per_step))
    compiles = [compile_row(step, function=f"f{n}") for step, count in enumerate(per_step) for n in range(count)]
    (storm,) = view(steps=rows, compiles=compiles).storms
    return storm


def offline(per_step: list[int]) -> CompileStorm:
    """The same as torch_xla's log with steps has it."""
    last = len(per_step) - 1
    (storm,) = view(compiles=xla_compiles(per_step), counters=xla_counters(per_step, step=last)).storms
    return storm


@pytest.mark.parametrize("made", [live, offline])
@pytest.mark.parametrize(
    ("per_step", "whole_run", "windows", "first"),
    [
        (BAD, True, 3, 12),
        (BURST, False, 0, None),
        (LATE, False, 38, 102),
        (GOOD, False, 0, None),
    ],
    ids=["bad", "burst", "late", "good"],
)
def test_known_sequences(made: object, per_step: list[int], whole_run: bool, windows: int, first: int | None) -> None:
    storm = made(per_step)  # type: ignore[operator]
    assert (storm.compiles, storm.steps) == (sum(per_step), len(per_step))
    assert storm.whole_run is whole_run
    assert (storm.windows, storm.first_window_step) == (windows, first)


def test_without_steps_nothing_is_said() -> None:
    found = view(compiles=[compile_row(None)])
    assert found.storms == ()
    assert any("how often it compiled per step is not known" in note for note in found.notes)


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
