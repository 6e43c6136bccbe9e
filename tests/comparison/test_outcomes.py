"""Pairs of runs to an outcome: effects, what makes it void, what is left out, many candidates, energy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from stepscope.comparison import outcomes
from stepscope.comparison.thresholds import FIXED_ALPHA, Alpha, Limits
from stepscope.dashboard.pages import experiments
from stepscope.model.comparison import (
    FASTER,
    LESS,
    MORE,
    NO_DIFFERENCE,
    UNDECIDED,
    VOID,
    AppliedKnob,
    Measure,
    Outcome,
    PhaseTime,
)
from stepscope.report import experiment_report
from stepscope.schema import Knob
from tests.comparison.measures import flag, measure, pairs
from tests.records import replace, some
from tests.report.fabricate_experiment import KEPT

WORKERS = Knob("loader.num_workers", "2")
QUICK = [0.70, 0.72, 0.73, 0.71, 0.74]
EQUAL = [1.01, 0.99, 1.005, 0.995, 1.0]
LIMITS = Limits()


def outcome(
    knobs: Sequence[Knob],
    pairs: Sequence[tuple[Measure, Measure]],
    *,
    candidates: int = 1,
    alpha: Alpha = FIXED_ALPHA,
) -> Outcome:
    return outcomes.outcome(knobs, pairs, LIMITS, candidates=candidates, alpha=alpha)


def corrected(found: Sequence[Outcome], alpha: Alpha = FIXED_ALPHA) -> list[Outcome]:
    return outcomes.corrected(found, LIMITS, alpha)


LOSSES = tuple((step, 2.0 - step / 200) for step in range(100))


def test_a_faster_candidate() -> None:
    found = outcome([WORKERS], pairs(QUICK))
    assert found.verdict.word == FASTER
    assert found.verdict.text == "faster by 28 % (95 %: 26 to 30 %), 5 pairs"
    assert found.knobs == (WORKERS,)
    assert set(found.effects) == {"mean_ms", "median_ms", "p95_ms", "samples_per_second", "fixed_cost_s"}
    assert found.effects["samples_per_second"].ratio == pytest.approx(1 / found.effects["mean_ms"].ratio)
    assert found.effects["fixed_cost_s"].ratio == 1
    assert (found.headline, len(found.pairs), found.left_out, found.flags) == ("mean_ms", 5, (), ())


def test_a_forward_pass_that_one_side_cannot_tell_is_compared_with_all_else() -> None:
    apart = (PhaseTime("backward", 50.0), PhaseTime("forward", 40.0), PhaseTime("other", 10.0))
    joined = (PhaseTime("backward", 40.0), PhaseTime("other", 40.0))
    found = outcome([], pairs([0.8] * 3, {"phases": apart}, phases=joined)).phases
    assert {one.category: (one.baseline_ms, one.candidate_ms) for one in found} == {
        "backward": (50.0, 40.0),
        "forward_or_other": (50.0, 40.0),
    }


def test_phases_sum_to_the_difference_of_the_means() -> None:
    found = outcome([], pairs(QUICK))
    by_name = {phase.category: phase for phase in found.phases}
    assert by_name["data_wait"].baseline_ms == pytest.approx(20)
    assert by_name["data_wait"].candidate_ms == pytest.approx(14.4)
    assert sum(phase.difference_ms for phase in found.phases) == pytest.approx(-28)
    wait = by_name["data_wait"]
    assert wait.low_ms is not None
    assert wait.high_ms is not None
    assert wait.low_ms < wait.difference_ms < wait.high_ms
    assert (wait.low_ms + wait.high_ms) / 2 == pytest.approx(-5.6)


def test_a_flagged_run_takes_its_pair_out() -> None:
    runs = pairs(QUICK)
    throttled = replace(runs[1][1], flags=(flag("throttled", withholds=True, text="the clock was held down"),))
    found = outcome([WORKERS], [runs[0], (runs[1][0], throttled), *runs[2:]])
    assert found.left_out == (throttled,)
    assert len(found.pairs) == found.effects["mean_ms"].pairs == 4
    assert found.verdict.word == FASTER
    assert [one.name for one in found.flags] == ["throttled"]


def test_too_few_clean_pairs_name_the_flag() -> None:
    runs = pairs(QUICK)
    busy = [
        (before, replace(after, flags=(flag("busy", withholds=True, text="others took the cores"),)))
        for before, after in runs
    ]
    few = outcome([], [*runs[:2], *busy[2:]])
    assert few.verdict.word == UNDECIDED
    assert "others took the cores (in 3 of 10 runs)" in few.verdict.text
    none = outcome([], busy)
    assert none.verdict.word == VOID
    assert none.verdict.text == "void: no pair is left: others took the cores (in 5 of 10 runs)"
    assert (none.effects, none.phases, none.pairs) == ({}, (), ())


REFUSED = AppliedKnob("loader.num_workers", "2", applied=False, reason="no DataLoader was made")
FLAGGED = {"flags": (flag("knob_not_applied", withholds=True, text="2 workers could not be given"),)}
STUCK = {"losses": tuple((step, 2.0) for step, _ in LOSSES)}


@pytest.mark.parametrize(
    ("knob", "changes", "text"),
    [
        (WORKERS, FLAGGED, "void: 2 workers could not be given (in 5 of 10 runs)"),
        # what is reported needs no flag
        (WORKERS, {"knobs": (REFUSED,)}, "void: loader.num_workers=2 was not applied: no DataLoader was made"),
        (WORKERS, {"knobs": (REFUSED, replace(REFUSED, applied=True, observed="2"))}, "faster by 28 %"),
        (Knob("threads.intra_op", "1"), {"knobs": (REFUSED,)}, "faster by 28 %"),
        (WORKERS, STUCK, "void: its loss goes another way: the mean loss of the later 50 steps differs"),
    ],
)
def test_what_makes_it_void_whatever_the_effect(knob: Knob, changes: dict[str, Any], text: str) -> None:
    found = outcome([knob], pairs(QUICK, {"losses": LOSSES}, **{"losses": LOSSES, **changes}))
    assert found.verdict.text.startswith(text)
    assert (found.verdict.word == VOID) == text.startswith("void")


def test_another_batch_size_compares_samples_per_second() -> None:
    """Twice the samples in 1.5 times the time."""
    runs = [
        (
            before,
            replace(after, samples_per_step=64.0, samples_per_second=64e3 / after.mean_ms, losses=LOSSES),
        )
        for before, after in pairs([1.5, 1.51, 1.49], {"losses": LOSSES})
    ]
    found = outcome([Knob("arg:--batch-size", "64")], runs)
    assert found.headline == "samples_per_second"
    assert found.verdict.word == FASTER
    assert found.verdict.text == (
        "faster: 33 % more samples per second (95 %: 31 to 36 %), 3 pairs; "
        "the batch size differs: convergence is not judged"
    )
    assert not some(found.equivalence).judged


@pytest.mark.parametrize("odd", [0.0, -1.0, math.nan, math.inf])
def test_a_mean_that_is_no_time_raises_nothing(odd: float) -> None:
    found = outcome([], [(measure(odd, "A"), measure(100.0, "B", samples_per_second=None))] * 3)
    assert found.verdict.word == UNDECIDED
    assert "mean_ms" not in found.effects


NOISY = [0.90, 1.04, 0.93, 1.01, 0.97]
STEADY = [0.955, 0.96, 0.95, 0.957, 0.953]


def runs_of(means: list[float], medians: list[float]) -> list[tuple[Measure, Measure]]:
    """Pairs with ratios of their own for mean and median."""
    return [
        (before, replace(after, median_ms=before.median_ms * ratio))
        for (before, after), ratio in zip(pairs(means), medians, strict=True)
    ]


def test_a_figure_is_corrected_over_the_candidates_by_itself() -> None:
    """Of the mean the second candidate has the smallest p-value, of the median the first."""
    first, second = outcome([], runs_of(NOISY, STEADY)), outcome([], runs_of(QUICK, [0.7, 0.75, 0.69, 0.74, 0.7]))
    alone = {name: [one.effects[name].p_value for one in (first, second)] for name in ("mean_ms", "median_ms")}
    judged = corrected([first, second])
    after = {name: [one.effects[name].p_value for one in judged] for name in ("mean_ms", "median_ms")}
    assert after["mean_ms"] == pytest.approx([alone["mean_ms"][0], 2 * (alone["mean_ms"][1] or 0)])
    assert after["median_ms"] == pytest.approx([2 * (alone["median_ms"][0] or 0), alone["median_ms"][1]])
    assert [one.verdict.word for one in judged] == [FASTER, FASTER]
    assert corrected(judged) == judged


DOUBTFUL = [0.96, 0.99, 0.97, 0.985]


def test_many_candidates_are_corrected_by_holm() -> None:
    alone = outcome([], pairs(DOUBTFUL))
    assert alone.verdict.word == FASTER
    p = some(alone.effects["mean_ms"].p_value)
    others = [outcome([], pairs(EQUAL)) for _ in range(5)]
    judged = corrected([alone, outcome([WORKERS], pairs(QUICK)), *others])
    assert [one.verdict.word for one in judged] == [UNDECIDED, FASTER, *[NO_DIFFERENCE] * 5]
    assert judged[0].effects["mean_ms"].p_value == pytest.approx(6 * p)
    assert "one of 7 candidates may show that by chance" in judged[0].verdict.text
    assert corrected(judged) == judged


def test_a_stricter_level_for_pairs_that_were_stopped() -> None:
    runs = pairs(DOUBTFUL)
    p = some(outcome([], runs).effects["mean_ms"].p_value)
    assert 0.035 < p < 0.045
    stricter, looser = Alpha(mean=p - 0.001, median=p - 0.001), Alpha(mean=p + 0.001, median=p - 0.001)
    assert outcome([], runs, alpha=looser).verdict.text == "faster by 2.4 % (95 %: 0.2 to 4.6 %), 4 pairs"
    stopped = outcome([], runs, alpha=stricter)
    assert stopped.verdict.word == UNDECIDED
    assert "by itself, but that may be chance" in stopped.verdict.text
    assert corrected([outcome([], runs)], alpha=stricter)[0].verdict.word == UNDECIDED
    by_median = outcome([], runs, alpha=Alpha(mean=p - 0.001, median=p + 0.001))
    assert by_median.verdict.text == (
        "faster by 2.4 % by the median step (95 %: 0.2 to 4.6 %), 4 pairs; "
        "the mean, which is less certain, says 2.4 % (0.2 to 4.6 %)"
    )


# ------------------------------------------------------------------------------------------------------------- energy


SOURCES = ("GPU by counter",)


def drew(joules: float | None, label: str, mean_ms: float = 100.0, **more: Any) -> Measure:
    """A run of 32 samples a step."""
    known = {} if joules is None else {"joules_per_step": joules, "joules_per_sample": joules / 32}
    usual = {"energy_sources": SOURCES if joules is not None else (), "energy_absent": None if joules else "no counter"}
    return measure(mean_ms, label, **{**usual, **known, **more})


def drawing(ratios: Sequence[float | None], times: Sequence[float] = QUICK, **more: Any) -> list[Any]:
    return [
        (drew(20.0, f"A{n}"), drew(None if ratio is None else 20 * ratio, f"B{n}", 100 * time, **more))
        for n, (ratio, time) in enumerate(zip(ratios, times, strict=True))
    ]


@pytest.mark.parametrize(
    ("ratios", "word", "text"),
    [
        ([0.80, 0.82, 0.81, 0.79, 0.80], LESS, "less energy a sample by 20 % (95 %: 18 to 21 %), 5 pairs"),
        ([1.10, 1.12, 1.11, 1.10, 1.11], MORE, "more energy a sample by 11 %"),
        ([1.00, 1.002, 0.999, 1.001, 1.0], NO_DIFFERENCE, "energy a sample: no difference larger than 0.2 %, 5 pairs"),
        ([0.7, 1.4, 0.8, 1.2, 1.0], UNDECIDED, "energy a sample: undecided"),
    ],
)
def test_energy_has_the_interval_of_the_step_time(ratios: list[float], word: str, text: str) -> None:
    """And a fix that saves time but no energy is told from one that saves both."""
    found = outcome([], drawing(ratios))
    said = some(found.energy)
    assert (found.verdict.word, said.word, said.figure) == (FASTER, word, "joules_per_sample")
    assert said.text.startswith(text)
    assert ("time falls but energy does not" in said.text) == (word in (MORE, NO_DIFFERENCE))
    assert set(found.effects) >= {"mean_ms", "joules_per_sample"}
    assert "joules_per_step" not in found.effects


def test_what_one_side_lacks_is_said_and_not_compared() -> None:
    lacking = some(outcome([], drawing([0.8, 0.8, None, 0.8, 0.8])).energy)
    assert (lacking.word, lacking.text) == (UNDECIDED, "energy is not compared: B2: no counter")
    other = some(outcome([], drawing([0.8] * 5, energy_sources=(*SOURCES, "processors by RAPL"))).energy)
    assert "GPU by counter against GPU by counter, processors by RAPL" in other.text
    nothing = some(outcome([], drawing([0.0, 0.8, 0.8, 0.8, 0.8])).energy)
    assert nothing.text == "energy is not compared: a run drew nothing a sample"
    neither = [(measure(100.0, "A"), measure(90.0, "B"))]
    assert outcome([], neither).energy is None  # nobody looks for it there


def test_many_candidates_find_energy_by_chance_no_sooner() -> None:
    """Of 40 candidates one that is barely certain alone says nothing, before and after all of them are seen."""
    given = drawing([0.97, 0.99, 0.975, 0.985, 0.98], [1.0, 1.01, 0.99, 1.0, 1.0])
    assert some(outcome([], given).energy).word == LESS
    assert some(outcome([], given, candidates=40).energy).word == UNDECIDED
    many = corrected([outcome([], given, candidates=40) for _ in range(40)])
    assert {some(one.energy).word for one in many} == {UNDECIDED}


def test_an_experiment_keeps_and_shows_what_energy_says() -> None:
    kept = replace(KEPT, tried=(replace(KEPT.tried[0], outcome=outcome([], drawing([0.8] * 5))),))
    found = experiment_report.loads(experiment_report.dumps(kept))
    said = some(found.tried[0].outcome.energy)
    assert (said.word, said.figure) == (LESS, "joules_per_sample")
    assert found.tried[0].outcome.pairs[0][1].energy_sources == SOURCES
    shown = [block for section in experiments.screen(experiment_report.experiment_document(found)) for block in section]
    notes = next(block for block in shown if block.get("id") == "candidate-notes")
    assert [row["text"] for row in notes["rows"] if row["about"] == "energy"] == [said.text]


def test_prices_say_what_steps_cost_less() -> None:
    given = [
        (drew(20.0, f"A{n}", cost_per_1000_steps=0.02), drew(16.0, f"B{n}", 90.0, cost_per_1000_steps=0.017))
        for n in range(3)
    ]
    assert some(outcome([], given).energy).text.endswith("at your prices 1,000 steps cost 15 % less")
