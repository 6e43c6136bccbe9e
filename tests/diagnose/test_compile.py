"""Recompilations of torch.compile: the limit, what is close to it, what repeats, and graph breaks."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.model.compilers import Change, EagerAfterLimit
from tests.diagnose.compiler_views import cause, facts, found, judged, line, only, steps, view
from tests.diagnose.judged import values

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


def test_the_cost_of_the_limit_is_what_its_cure_would_save() -> None:
    first = cause("compile", "", total_ms=5_000.0)
    finding = only(view(first, counter(), limit()), "compile.limit_hit")
    assert finding.cost_ms_per_step == pytest.approx(720 / 20)
    assert finding.share == finding.gain_ceiling == pytest.approx(720 / 2_000)
    assert finding.severity == "critical"
    assert finding.confidence == "high"


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


def test_a_limit_nobody_timed_has_no_cost_and_is_no_finding() -> None:
    assert found(view(counter(total_ms=None), limit(total_ms=None))) == []


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
        ("unknown", None, "move it out of the compiled part"),
        ("unexplained", None, "TORCH_LOGS=recompiles"),
        ("a word of a later version", None, "move it out of the compiled part"),
    ],
)
def test_the_fix_goes_by_the_cause(word: str, subject: str | None, advice: str) -> None:
    told = "" if word == "unexplained" else "odd words"
    seen = cause("recompile", word, subject=subject, place=line(13), count=3, total_ms=400.0, text=told)
    assert advice in only(view(seen), "compile.same_cause").fix


def test_the_first_compilation_of_a_frame_is_no_loss() -> None:
    assert found(view(cause("compile", "", total_ms=1_900.0))) == []


def test_the_cost_is_spread_over_training_steps_and_the_share_is_of_all_steps() -> None:
    evaluation = cause("recompile", "shape", kinds=("eval",), count=3, total_ms=600.0)
    both = (steps(20, 2_000.0), steps(10, 1_000.0, kind="eval"))
    finding = only(view(evaluation, of_steps=both), "compile.same_cause")
    assert "in evaluation" in finding.title
    assert finding.cost_ms_per_step == pytest.approx(600 / 20)
    assert finding.share == pytest.approx(600 / 3_000)


def test_compiling_between_steps_counts_and_never_beyond_the_whole() -> None:
    outside = cause("recompile", "shape", count=3, total_ms=6_000.0, in_main_steps_ms=0.0)
    finding = only(view(outside), "compile.same_cause")
    assert finding.cost_ms_per_step == pytest.approx(300)
    assert finding.share == pytest.approx(6_000 / 8_000)


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


def test_a_graph_break_nobody_timed_is_no_finding() -> None:
    assert found(view(broken())) == []
    assert found(view(broken(), resumed(total_ms=None))) == []
    assert found(view(broken(), resumed(number=99))) == []


def test_cheap_graph_breaks_are_told_together() -> None:
    pairs = [(broken(number), resumed(number, 10.0)) for number in (14, 16, 20)]
    finding = only(view(*(each for pair in pairs for each in pair)), "compile.graph_break")
    assert "3 lines" in finding.title
    assert {place.line for place in finding.where} >= {14, 16, 20}
    assert finding.severity == "info"


def test_without_step_times_the_rules_abstain_by_name() -> None:
    abstained = {each.rule: each for each in judged(view(counter(), of_steps=())).abstained}
    assert abstained["compile.limit_hit"].needs == "training steps, or rates of a torch_xla report"
    assert not abstained["compile.limit_hit"].quiet
    assert abstained["compile.unlowered"].quiet


def test_what_cannot_tell_recompilations_abstains_by_name() -> None:
    counters = facts(recompiles=None, graph_breaks=None, compile_ms=None, longest_ms=None)
    abstained = {each.rule: each.needs for each in judged(view(about=counters)).abstained}
    assert "told from first" in abstained["compile.same_cause"]
    assert abstained["compile.share"] == "durations of compilations"
    assert "graph breaks" in abstained["compile.graph_break"]
