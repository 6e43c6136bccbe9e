"""Recompilations of torch.compile: the limit, what is close to it, what repeats, and graph breaks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.diagnose import REPORT_FLOOR, diagnose
from stepscope.model import SEVERITIES
from stepscope.model.compilers import Change, CompilerCause, CompilersView, EagerAfterLimit
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
from tests.diagnose.judged import needs, values
from tests.records import replace

HINT = "torch._dynamo.config.allow_unspec_int_on_nn_module = True"


def counter(**given: Any) -> Any:
    """`s.calls` changes in every step."""
    usual = {
        "place": line(18),
        "subject": "s.calls",
        "hint": HINT,
        "count": 7,
        "steps": tuple(range(1, 8)),
        "changes": tuple(Change(step, str(step - 1), None) for step in range(1, 8)),
        "total_ms": 700.0,
        "cache_entries": 7,
        "limit": 8,
    }
    return cause("recompile", "int_attribute", **{**usual, **given})


def limit(**given: Any) -> Any:
    usual = {
        "place": line(18),
        "subject": "s.calls",
        "steps": (8,),
        "total_ms": 20.0,
        "limit": 8,
        "text": "2/7: s.calls == 7",
    }
    return cause("limit_hit", "int_attribute", **{**usual, **given})


def test_inputs_beyond_the_limit_run_eagerly_since_a_step_because_of_a_line() -> None:
    finding = only(view(counter(), limit()), "compile.limit_hit")
    assert finding.title == (
        "Since step 8, inputs of forward (train.py:18) that match none of its 8 compiled versions run eagerly: "
        "s.calls changes every step"
    )
    assert finding.where[0] == line(18)
    assert "allow_unspec_int_on_nn_module" in finding.fix
    assert f"The compiler's hint: {HINT}" in finding.fix
    assert "not measured" in finding.caveat
    assert values(finding)["compiled versions at most"] == 8
    assert values(finding)["the compiler's reason"] == "2/7: s.calls == 7"


def test_the_ceiling_holds_for_steps_behind_warm_up_and_what_compilers_do_not_tell() -> None:
    """Of 40 steps the first takes 8 of 12 s, for the device; the last 30 compile all the time and tell of half."""
    of_steps = steps(40, 12_000.0, compile_ms=2_000.0, late_compile_ms=1_500.0, late_wall_ms=3_000.0, mean_quiet_ms=2.0)
    finding = only(view(counter(limit=None, total_ms=2_000.0), of_steps=(of_steps,)), "compile.same_cause")
    assert finding.share == pytest.approx(2 / 12)
    assert finding.gain_ceiling == pytest.approx((3_000 - 30 * 2) / 3_000)


@pytest.mark.parametrize(
    ("before", "after", "more_ms"),
    [(20.0, 50.0, 30), (20.0, 20.5, 0), (20.0, 12.0, 0), (None, 50.0, 0), (20.0, None, 0)],
)
def test_eager_steps_add_what_they_are_known_to_take_more(
    before: float | None, after: float | None, more_ms: float
) -> None:
    eager = EagerAfterLimit(limit().id, 8, before, 8, after, 11)
    finding = only(view(counter(), limit(), limits=(eager,)), "compile.limit_hit")
    assert finding.share == pytest.approx((720 + more_ms * 11) / 2_000)


def test_steps_that_two_functions_make_slower_count_once() -> None:
    other = {"function": "encode", "definition": line(40, "encode"), "place": line(44, "encode")}
    eager = [EagerAfterLimit(each.id, 8, 20.0, 8, 50.0, 11) for each in (limit(), limit(**other))]
    findings = found(view(counter(), limit(), counter(**other), limit(**other), limits=tuple(eager)))
    assert sum(finding.share for finding in findings) == pytest.approx((1_440 + 30 * 11) / 2_000)
    assert "counted with another function" in findings[1].caveat
    assert [finding.confidence for finding in findings] == ["medium", "high"]


def test_a_torch_that_gives_no_reasons_still_tells_the_limit() -> None:
    again = cause("recompile", "", count=7, total_ms=300.0, cache_entries=7, limit=8)
    finding = only(view(again, cause("limit_hit", "", total_ms=1.0, limit=8, steps=(8,))), "compile.limit_hit")
    assert finding.title.endswith("run eagerly: this version of torch does not say why")
    assert finding.confidence == "low"
    assert "TORCH_LOGS=recompiles" in finding.fix


@pytest.mark.parametrize(("entries", "rule"), [(5, "compile.same_cause"), (6, "compile.close_to_limit")])
def test_six_of_eight_versions_are_close(entries: int, rule: str) -> None:
    finding = only(view(counter(cache_entries=entries, count=entries, steps=tuple(range(1, entries + 1)))), rule)
    assert "s.calls changes every step" in finding.title


@pytest.mark.parametrize(
    ("word", "subject", "advice"),
    [
        ("float_argument", "scale", "torch.tensor(scale)"),
        ("attribute", "fn.1.training", "before torch.compile"),
        ("attribute", "self.param_groups[0]['lr']", "lr=torch.tensor"),
        ("shape", "t.size(0)", "so of every other size"),
        ("shape", "self.layers.0.bias.size(0)", "short trials of other sizes"),
        ("requires_grad", "self.layers.0.bias", "in few stages"),
        ("type", "self.config.problem_type", "once before training"),
        ("unknown", None, "move it out of the compiled part"),
        ("unexplained", None, "TORCH_LOGS=recompiles"),
        ("a word of a later version", None, "move it out of the compiled part"),
    ],
)
def test_the_fix_goes_by_the_cause(word: str, subject: str | None, advice: str) -> None:
    told = "" if word == "unexplained" else "odd words"
    hint = "use force_parameter_static_shapes = False" if "bias" in (subject or "") else None
    seen = cause("recompile", word, subject=subject, place=line(13), count=3, total_ms=400.0, text=told, hint=hint)
    assert advice in only(view(seen), "compile.same_cause").fix


def test_the_cost_is_spread_over_training_steps_and_the_share_is_of_all_steps() -> None:
    evaluation = cause("recompile", "shape", kinds=("eval",), count=3, total_ms=600.0)
    both = (steps(20, 2_000.0), steps(10, 1_000.0, kind="eval"))
    finding = only(view(evaluation, of_steps=both), "compile.same_cause")
    assert "in evaluation" in finding.title
    assert finding.cost_ms_per_step == pytest.approx(600 / 20)
    assert finding.share == pytest.approx(600 / 3_000)


def test_few_steps_lower_the_confidence() -> None:
    finding = only(view(counter(), of_steps=(steps(5, 2_000.0),)), "compile.close_to_limit")
    assert finding.confidence == "medium"


def broken(number: int = 14, word: str = "item", **given: Any) -> Any:
    usual = {"place": line(number), "steps": (0,), "total_ms": None, "text": "Unsupported Tensor.item() call"}
    return cause("graph_break", word, **{**usual, **given})


def resumed(number: int = 14, total_ms: float | None = 300.0, **given: Any) -> Any:
    name = f"torch_dynamo_resume_in_forward_at_{number}"
    return cause("compile", "", function=name, total_ms=total_ms, **{"steps": (0,), **given})


def test_a_graph_break_in_the_step_costs_what_compiling_behind_it_took() -> None:
    finding = only(view(broken(), resumed()), "compile.graph_break")
    assert finding.cost_ms_per_step == pytest.approx(300 / 20)
    assert finding.where[0] == line(14)
    assert "train.py:14" in finding.title
    assert "was not measured" in finding.caveat
    assert finding.confidence == "low"
    assert finding.severity == "warning"


@pytest.mark.parametrize(
    "made",
    [
        view(counter(total_ms=None), limit(total_ms=None)),  # nobody timed it: it has no cost
        view(cause("compile", "", total_ms=1_900.0)),  # the first compilation of a frame
        view(broken()),
        view(broken(), resumed(total_ms=None)),
        view(broken(), resumed(number=99)),
    ],
)
def test_what_nobody_timed_or_has_to_be_is_no_finding(made: CompilersView) -> None:
    assert found(made) == []


@pytest.mark.parametrize(("tries", "words"), [(1, "Compiling forward fails (train.py:14): "), (30, "fails 30 times ")])
def test_a_compilation_that_fails_at_its_break_is_its_cost(tries: int, words: str) -> None:
    failed = cause("failure", "item", place=line(14), count=tries, total_ms=300.0, steps=tuple(range(tries)))
    again_ms = 300.0 * (tries > 1)
    (finding,) = found(view(broken(), failed, storms=(storm(late_ms=again_ms, late_share=0.2),)))
    assert finding.rule == "compile.graph_break"
    assert finding.cost_ms_per_step == pytest.approx(300 / 20)
    assert words in finding.title
    assert "running eagerly" in finding.caveat
    assert ("paid once" in finding.caveat, "no more" in finding.fix) == (tries == 1, tries > 1)


def test_cheap_graph_breaks_are_told_together() -> None:
    pairs = [(broken(number), resumed(number, 10.0)) for number in (14, 16, 20)]
    finding = only(view(*(each for pair in pairs for each in pair)), "compile.graph_break")
    assert "3 lines" in finding.title
    assert {place.line for place in finding.where} >= {14, 16, 20}
    assert finding.severity == "info"


def test_rules_abstain_by_name() -> None:
    lacks = needs(judged(view(counter(), of_steps=())))
    assert lacks["compile.limit_hit"] == ("training steps, or rates of a torch_xla report", False)
    assert lacks["compile.unlowered"][1]
    counters = facts(recompiles=None, graph_breaks=None, compile_ms=None, longest_ms=None)
    lacks = needs(judged(view(about=counters)))
    assert "told from first" in lacks["compile.same_cause"][0]
    assert lacks["compile.share"][0] == "durations of compilations"
    assert "graph breaks" in lacks["compile.graph_break"][0]


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
    assert needs(judged(bare))["compile.too_frequent"][0].startswith("training")


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
