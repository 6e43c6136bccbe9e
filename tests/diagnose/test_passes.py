"""The rules on work that training does not need: they speak of its cost with its line, and abstain without traces."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.diagnose.gains import PIPELINE
from stepscope.diagnose.needless_work import DOUBLES, PASSES, RECOMPUTE, told_places
from stepscope.model import CATEGORIES, Analysis, Finding, LoopFacts, Place, device_losses
from stepscope.model.trace import GpuProperties
from tests.analyze.scenes import TRAIN
from tests.builders import make_tables, rank_info, step_rows
from tests.records import blank, replace

OURS = {
    *("host.evaluation_in_step", "host.model_copied_in_step", "compute.double_precision"),
    *("compute.recompute", "memory.short_lived_gradients"),
}
STEP_MS = 10.0  # of `step_rows`
LINE = device_losses.PassLine(Place(TRAIN, 12, "forward"), 1.0, True)
CALL = device_losses.ExtraCall(
    module="Net_0",
    place=Place(TRAIN, 20, "accuracy"),
    exact=True,
    calls_per_step=1,
    steps_share=1.0,
    ms_per_step=3.0,
    around_ms_per_step=3.5,
    at_most_ms_per_step=3.5,
    around=Place(TRAIN, 18, "accuracy"),
    nodes_per_step=6,
    samples=60,
    source="sampled stacks, 60 of 200 samples in steps",
)
COPY = device_losses.ModelCopy(
    "copy.deepcopy", Place(TRAIN, 30, "train"), 2.0, 2.5, 40, "sampled stacks, 40 of 200 samples in steps"
)
TWICE = device_losses.Doubles(4.0, 1.0, 10, 4, (LINE,), {"aten::mm": 3.5, "aten::linear": 0.5})
AGAIN = device_losses.Recompute(2.0, 8, 2, (LINE,), None, 40, "sampled stacks, 40 of 200 samples in steps")
WIDE = device_losses.WideGradients(
    node="SelectBackward0",
    forward="aten::select",
    place=Place(TRAIN, 59, "looped_loss"),
    exact=True,
    calls_per_step=256,
    bytes_per_call=4 << 20,
    shape=(8, 256, 512),
    part=(8, 512),
    dtype="float",
    dimension="256 = dim 1 of (8, 256, 512)",
    ms_per_step=4.0,
    at_most_ms_per_step=5.0,
)
_NOTHING: dict[str, Any] = {
    "run": "",
    "traces": ("rank-0/span1",),
    "ranks": (0,),
    "steps": 3,
    "step_ms": STEP_MS,
    "on_device": False,
}
_NOTHING |= dict.fromkeys(("gpus", "extra_calls", "wide_gradients", "copies"), ())
_NOTHING |= dict.fromkeys(("has_steps", "modules", "types", "shapes", "numbered", "functions"), True)
NOTHING = blank(device_losses.PassFacts, **_NOTHING)


def analysis(copies: tuple[device_losses.ModelCopy, ...] | None = (), device: str = "cpu", **facts: Any) -> Analysis:
    made = analyze(make_tables(steps=step_rows(50), ranks=[rank_info(device=device)]))
    return replace(made, passes=device_losses.PassesFacts((replace(NOTHING, **facts),), copies))


def findings(given: Analysis) -> list[Finding]:
    return [one for one in diagnose(given).findings if one.rule in OURS]


def only(given: Analysis) -> Finding:
    (found,) = findings(given)
    return found


LOSSES: dict[str, dict[str, Any]] = {
    "host.evaluation_in_step": {"extra_calls": (CALL,)},
    "host.model_copied_in_step": {"copies": (COPY,)},
    "compute.double_precision": {"doubles": TWICE},
    "compute.recompute": {"recompute": AGAIN},
    "memory.short_lived_gradients": {"wide_gradients": (WIDE,)},
}


@pytest.mark.parametrize("rule", sorted(LOSSES))
def test_each_speaks_of_its_loss_alone(rule: str) -> None:
    found = only(analysis(**LOSSES[rule]))
    assert found.rule == rule
    assert found.category in CATEGORIES
    assert 0 < found.share <= found.gain_ceiling <= 1
    assert found.cost_ms_per_step == pytest.approx(found.share * STEP_MS)
    assert found.evidence
    assert all(one.source for one in found.evidence)
    assert found.where
    assert found.fix
    assert found.caveat
    assert found.falsified_by
    assert found.learn.startswith("https://")
    assert found == only(analysis(**LOSSES[rule]))


@pytest.mark.parametrize(
    "small",
    [
        {"extra_calls": (replace(CALL, ms_per_step=0.4),)},
        {"extra_calls": (replace(CALL, steps_share=PASSES.recurring - 0.1),)},
        {"copies": (replace(COPY, ms_per_step=0.4),)},
        {"copies": (replace(COPY, samples=PASSES.samples - 1),)},
        {"doubles": replace(TWICE, compute_ms_per_step=0.5, conversion_ms_per_step=0.2)},
        {"recompute": replace(AGAIN, ms_per_step=0.4)},
        {"recompute": replace(AGAIN, memory_share=RECOMPUTE.full + 0.1)},
        {"wide_gradients": (replace(WIDE, ms_per_step=0.4),)},
    ],
)
def test_what_is_small_rare_or_needed_is_no_finding(small: dict[str, Any]) -> None:
    assert findings(analysis(**small)) == []


@pytest.mark.parametrize(
    ("missing", "rule"),
    [
        ("modules", "host.evaluation_in_step"),
        ("types", "compute.double_precision"),
        ("shapes", "memory.short_lived_gradients"),
        ("numbered", "compute.recompute"),
    ],
)
def test_a_trace_without_something_silences_one_rule(missing: str, rule: str) -> None:
    facts: dict[str, Any] = {missing: False}
    given = analysis(**facts)
    assert {one.rule for one in diagnose(given).abstained} & OURS == {rule}


def test_the_places_told_are_those_of_the_findings() -> None:
    given = analysis(extra_calls=(CALL, replace(CALL, place=Place(TRAIN, 90, "f"), ms_per_step=0.1)), copies=(COPY,))
    assert set(told_places(given)) == {CALL.place, Place(TRAIN, None, "accuracy"), COPY.place}
    assert told_places(analysis()) == ()
    assert told_places(replace(given, passes=None)) == ()


def test_behind_a_copy_the_rest_of_the_step_is_slower_than_without() -> None:
    """A copy of half the step: what it costs afterwards goes with it, as far as the rest has it."""
    given = analysis(copies=(replace(COPY, ms_per_step=5.0, at_most_ms_per_step=5.5),))
    (finding,) = [one for one in diagnose(given).findings if one.rule == "host.model_copied_in_step"]
    assert finding.gain_ceiling == pytest.approx(0.55 + PIPELINE.cold_copies * 0.45)


def test_copies_on_a_device_are_those_of_the_trace() -> None:
    """Samples tell the host's time, which a device may hide."""
    facts = {"on_device": True, "copies": (replace(COPY, ms_per_step=1.0, samples=0),)}
    made = analysis(device="cuda")
    (run,) = made.passes.runs if made.passes is not None else ()
    given = replace(made, passes=device_losses.PassesFacts((replace(run, **facts),), (COPY,)))  # type: ignore[arg-type]
    assert only(given).share == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "capability", "most"),
    [
        ("NVIDIA H100", "9.0", DOUBLES.most),
        ("NVIDIA GeForce RTX 4090", "8.9", DOUBLES.most_slow),
        ("AMD Instinct MI300X", "9.4", DOUBLES.most),
    ],
)
def test_gpus_with_few_units_for_float64_could_gain_nearly_all(name: str, capability: str, most: float) -> None:
    gpu = GpuProperties(0, name, None, capability, None, None, None)
    found = only(analysis(doubles=TWICE, on_device=True, gpus=(gpu,)))
    assert found.gain_ceiling == pytest.approx((1.0 + most * 4.0) / STEP_MS)
    assert found.cost_ms_per_step == pytest.approx(3.0)


def test_recompute_doubts_itself_where_memory_is_unknown() -> None:
    assert only(analysis(recompute=AGAIN)).confidence == "medium"
    known = only(analysis(recompute=replace(AGAIN, memory_share=0.3)))
    assert known.confidence == "high"
    assert any(one.value == 0.3 for one in known.evidence)


# (line that makes the loop's calls, its `for`, its last line); the gradients are of line 59, and cost 4 of 10 ms
@pytest.mark.parametrize(
    ("loop", "share"),
    [((59, 58, 59), 0.25), ((60, 58, 61), 0.25), ((59, None, None), 0.25), ((30, 29, 31), 0.4), ((60, 59, 61), 0.4)],
)
def test_gradients_cost_no_more_than_the_loop_around_them(
    loop: tuple[int, int | None, int | None], share: float
) -> None:
    line, first, last = loop
    own = LoopFacts("aten::add", 256.0, 0.5, 2.0, Place(TRAIN, line, "looped_loss"), None, "window")
    timed = replace(own, loop_line=first, loop_end=last, backward_ms_per_step=2.0)
    (found,) = (
        one
        for one in findings(replace(analysis(wide_gradients=(WIDE,)), loops=(timed,)))
        if one.rule == "memory.short_lived_gradients"
    )
    assert found.share == pytest.approx(share)


@pytest.mark.parametrize(("facts", "level"), [({"has_steps": False}, "low"), ({"steps": 2}, "medium")])
def test_confidence_by_steps(facts: dict[str, Any], level: str) -> None:
    assert only(analysis(extra_calls=(CALL,), **facts)).confidence == level
