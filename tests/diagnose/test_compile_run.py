"""Compiling as a whole, transfers, operators without lowering; no loss is told twice, whatever the view."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.diagnose import REPORT_FLOOR, diagnose
from stepscope.model import SEVERITIES
from stepscope.model.compilers import CompilerCause, CompilersView, EagerAfterLimit
from tests.diagnose.compiler_views import (
    TORCH,
    XLA,
    analysis,
    cause,
    facts,
    found,
    judged,
    line,
    metric,
    only,
    point,
    steps,
    storm,
    view,
    warning,
)
from tests.diagnose.judged import values
from tests.records import replace

BASE = analysis(None)
ARTICLE = "CompileTime too frequent: 16 counts during 15 steps"


def report(**given: Any) -> CompilersView:
    """Fifteen steps of torch_xla, estimated from rates, as a metrics report gives them."""
    about = {"marked_steps": 15, "compiles": 1, "compile_ms": 365.0, "longest_ms": 365.0, **given.pop("about", {})}
    usual = {"of_steps": (steps(15, 500.0, XLA, estimated=True, late_compile_ms=None),), **given}
    return view(*usual.pop("causes", ()), backend=XLA, about=facts(XLA, **about), **usual)


def good() -> CompilersView:
    return report(storms=(storm(XLA, compiles=1, steps=15, windows=None),))


def bad() -> CompilersView:
    """A growing torch.cat and an .item(): sixteen compilations, thirty cheap transfers."""
    read = cause("compile", "read_value", backend=XLA, function="<module>", place=line(28), count=15, total_ms=None)
    return report(
        about={"compiles": 16, "compile_ms": 5_089.0, "longest_ms": 408.0, "transfers": 30},
        of_steps=(steps(15, 5_270.0, XLA, estimated=True, late_compile_ms=None),),
        causes=(read,),
        storms=(storm(XLA, compiles=16, steps=15, whole_run=True, windows=3, first_window_step=12),),
        metrics=(metric("TransferFromDeviceTime", 30, 43.2),),
        warnings=(
            warning("TransferFromDeviceTime too frequent: 29 counts during 15 steps", "too_frequent", "T", 29, 15),
            warning(ARTICLE, "too_frequent", "CompileTime", 16, 15),
        ),
    )


def read_items(**given: Any) -> CompilerCause:
    usual = {"operator": "aten::_local_scalar_dense", "place": line(29), "count": 15, "total_ms": None}
    return cause("transfer", "item", backend=XLA, function="<module>", **{**usual, **given})


def host_operator(name: str, word: str = "unlowered", count: int = 15, **given: Any) -> CompilerCause:
    usual = {"operator": name, "function": None, "definition": None, "call": None, "total_ms": None}
    return cause("fallback", word, id=f"fallback-{name}", backend=XLA, count=count, **{**usual, **given})


def fallback(*more: CompilerCause) -> CompilersView:
    return report(
        about={"compiles": 3, "compile_ms": 279.8, "longest_ms": 232.9, "transfers": 30, "fallbacks": 30},
        causes=(host_operator("aten::median"), host_operator("aten::special_i0e"), *more),
        metrics=(metric("TransferFromDeviceTime", 30, 3.4),),
        storms=(storm(XLA, compiles=3, steps=15, windows=None),),
    )


def test_the_good_report_is_clean() -> None:
    assert found(good()) == []


def test_the_bad_report_is_told_in_the_words_of_its_debug_log() -> None:
    finding = only(bad(), "compile.too_frequent")
    assert finding.title == ARTICLE
    assert finding.share == pytest.approx((5_089 - 408) / 5_270)
    assert finding.cost_ms_per_step == pytest.approx((5_089 - 408) / 15)
    assert finding.confidence == "medium"  # the step is estimated
    assert finding.where[0] == line(28)
    assert "torch.cat" in finding.fix
    assert "train.py:28" in finding.fix
    assert "at least 3 of the last 10" in values(finding)["also"]


def test_operators_on_the_host_own_their_transfers_and_compilations() -> None:
    finding = only(fallback(), "compile.unlowered")
    assert finding.title.startswith("Op(s) not lowered: aten::median, aten::special_i0e")
    assert finding.share == pytest.approx((3.4 + 279.8 - 232.9) / 500)
    assert "issue of pytorch/xla" in finding.fix


def test_a_costly_operator_does_not_let_its_compilations_or_transfers_speak_again() -> None:
    stormy = report(
        about={"compiles": 16, "compile_ms": 450.0, "longest_ms": 50.0, "transfers": 15, "fallbacks": 15},
        causes=(host_operator("aten::nonzero", "data_dependent_shape"),),
        metrics=(metric("TransferFromDeviceTime", 15, 60.0),),
        storms=(storm(XLA, compiles=16, steps=15, whole_run=True),),
    )
    finding = only(stormy, "compile.unlowered")
    assert finding.share == pytest.approx(460 / 500)


def test_items_beside_operators_keep_their_own_transfers() -> None:
    mixed = report(
        about={"transfers": 30, "fallbacks": 15, "compile_ms": None},
        causes=(host_operator("aten::median"), read_items()),
        metrics=(metric("TransferFromDeviceTime", 30, 200.0),),
    )
    shares = {finding.rule: finding.share for finding in found(mixed)}
    assert shares == {
        "compile.unlowered": pytest.approx(100 / 500),
        "transfer.device_to_host": pytest.approx(100 / 500),
    }


def test_a_report_without_rates_is_not_judged() -> None:
    bare = report(of_steps=(), about={"marked_steps": 15})
    assert found(bare) == []
    assert {each.rule: each.needs for each in judged(bare).abstained}["compile.too_frequent"].startswith("training")


def test_a_slow_execution_is_a_weak_finding() -> None:
    slow = report(
        of_steps=(steps(15, 100_000.0, XLA),),
        about={"compile_ms": 300.0},
        metrics=(metric("ExecuteTime", 15, 60_000.0, 31_000.0),),
    )
    finding = only(slow, "compute.execution_slow")
    assert finding.confidence == "low"
    assert "31 s" in finding.title
    quick = report(of_steps=slow.steps, metrics=(metric("ExecuteTime", 15, 60_000.0, 29_000.0),))
    assert found(quick) == []


def again(total_ms: float, **given: Any) -> CompilerCause:
    return cause("recompile", "shape", **{"count": 3, "subject": "x.size(0)", "total_ms": total_ms, **given})


def several(count: int, each_ms: float) -> list[CompilerCause]:
    """Recompilations of as many functions, each below the floor."""
    return [again(each_ms, function=f"f{number}", definition=line(number), count=1) for number in range(count)]


def test_what_causes_explain_is_not_told_again() -> None:
    about = facts(compiles=20, recompiles=10, compile_ms=1_400.0)
    storms = (storm(compiles=20, whole_run=True, windows=5, late_ms=850.0, late_share=0.5),)
    seen = found(view(again(820.0), *several(2, 40.0), about=about, storms=storms))
    assert [finding.rule for finding in seen] == ["compile.same_cause"]


@pytest.mark.parametrize(
    ("given", "rule", "words"),
    [
        ({"whole_run": True, "windows": 4}, "compile.too_frequent", "too frequent"),
        ({"windows": 4, "first_window_step": 102, "late_step": 90}, "compile.storm", "first at step 102"),
        ({"late_step": 812, "quiet_before": 300}, "compile.late", "Step 812 compiled after 300 steps"),
        ({}, "compile.share", "25% of the steps after warm-up"),
    ],
)
def test_the_strongest_rule_speaks_alone(given: dict[str, Any], rule: str, words: str) -> None:
    about = facts(recompiles=None, compile_ms=900.0, longest_ms=400.0)
    finding = only(view(about=about, storms=(storm(late_ms=500.0, late_share=0.25, **given),)), rule)
    assert words in finding.title
    assert finding.share == pytest.approx(500 / 2_000)


@pytest.mark.parametrize(("late_ms", "severity"), [(60.0, None), (300.0, "info"), (600.0, "warning")])
def test_the_share_after_warm_up_informs_then_warns(late_ms: float, severity: str | None) -> None:
    seen = found(view(storms=(storm(late_ms=late_ms, late_share=late_ms / 2_000),)))
    assert [finding.severity for finding in seen] == ([severity] if severity else [])


def test_a_slow_compilation_is_told_once() -> None:
    slow = cause("compile", "", total_ms=400_000.0, longest_ms=400_000.0, first_step=30, steps=())
    made = view(slow, of_steps=(steps(1_000, 1_000_000.0),), storms=(storm(late_step=30, late_ms=400_000.0),))
    finding = only(made, "compile.slow")
    assert "400 s" in finding.title
    assert finding.share == pytest.approx(0.4)


MS = st.one_of(st.none(), st.floats(0, 1e6))
COUNT = st.integers(0, 200)
PLACES = st.one_of(st.none(), st.builds(line, st.integers(1, 40)))


@st.composite
def any_cause(draw: st.DrawFn) -> CompilerCause:
    kind = draw(st.sampled_from(["compile", "recompile", "limit_hit", "graph_break", "fallback", "transfer"]))
    return cause(
        kind,
        draw(st.sampled_from(["", "shape", "item", "unknown", "read_value", "unlowered", "data_dependent_shape"])),
        id=f"id-{draw(st.integers(0, 10**9))}",
        backend=draw(st.sampled_from([TORCH, XLA])),
        function=draw(st.sampled_from([None, "forward", "torch_dynamo_resume_in_forward_at_7", "f"])),
        place=draw(PLACES),
        definition=draw(PLACES),
        call=draw(PLACES),
        operator=draw(st.sampled_from([None, "aten::median", "aten::_local_scalar_dense"])),
        count=draw(COUNT),
        total_ms=draw(MS),
        longest_ms=draw(MS),
        in_main_steps_ms=draw(MS),
        steps=tuple(draw(st.lists(COUNT, max_size=4))),
        cache_entries=draw(st.one_of(st.none(), COUNT)),
        limit=draw(st.sampled_from([None, 0, 8])),
        text=draw(st.text(max_size=20)),
    )


@st.composite
def any_view(draw: st.DrawFn) -> CompilersView:
    causes = draw(st.lists(any_cause(), max_size=8, unique_by=lambda each: each.id))
    about = [
        facts(
            backend,
            compiles=draw(COUNT),
            recompiles=draw(st.one_of(st.none(), COUNT)),
            transfers=draw(st.one_of(st.none(), COUNT)),
            compile_ms=draw(MS),
            longest_ms=draw(MS),
            marked_steps=draw(st.one_of(st.none(), COUNT)),
            step_estimate_ms=draw(MS),
        )
        for backend in draw(st.sampled_from([(TORCH,), (XLA,), (TORCH, XLA)]))
    ]
    return CompilersView(
        backends=tuple(about),
        causes=tuple(causes),
        steps=tuple(
            steps(draw(COUNT), draw(MS), each.backend, late_compile_ms=draw(MS), kind=kind)
            for each in about
            for kind in draw(st.sampled_from([(), ("train",), ("eval",), ("train", "eval")]))
        ),
        points=tuple(point(step, 3) for step in draw(st.lists(COUNT, max_size=3))),
        metrics=(metric("TransferFromDeviceTime", draw(COUNT), draw(st.floats(0, 1e6))),)
        if draw(st.booleans())
        else (),
        warnings=(),
        limits=tuple(
            EagerAfterLimit(each.id, None, draw(MS), 3, draw(MS), draw(COUNT))
            for each in causes
            if each.kind == "limit_hit"
        ),
        storms=tuple(
            storm(each.backend, whole_run=draw(st.booleans()), windows=draw(st.integers(0, 3)), late_ms=draw(MS))
            for each in about
        ),
    )


@settings(max_examples=100, deadline=None)
@given(any_view())
def test_whatever_the_view_shares_stay_within_the_run(made: CompilersView) -> None:
    findings = diagnose(replace(BASE, compilers=made)).findings
    assert sum(finding.share for finding in findings) <= 1 + 1e-9
    assert len({finding.id for finding in findings}) == len(findings)
    runs = {"compile.too_frequent", "compile.storm", "compile.late", "compile.share"}
    assert sum(finding.rule in runs for finding in findings) <= len(made.backends)
    for finding in findings:
        assert 0 < finding.gain_ceiling <= finding.share <= 1
        assert finding.cost_ms_per_step > 0
        assert finding.share >= REPORT_FLOOR or finding.rule in (
            "compile.limit_hit",
            "compile.graph_break",
            "compile.unlowered",
        )
        assert finding.severity in SEVERITIES
        assert finding.confidence in ("high", "medium", "low")
        assert finding.evidence
        assert all(each.source for each in finding.evidence)
        assert all((finding.title, finding.fix, finding.falsified_by, finding.caveat))
        assert len(finding.title) < 300
