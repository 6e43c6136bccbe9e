"""What pairs of runs say of energy, beside the step time and with the same interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stepscope.comparison import outcomes
from stepscope.comparison.thresholds import Limits
from stepscope.dashboard.pages import experiments
from stepscope.model.comparison import FASTER, LESS, MORE, NO_DIFFERENCE, UNDECIDED, Measure, Outcome
from stepscope.report import experiment_report
from stepscope.schema import Knob
from tests.comparison.measures import measure
from tests.records import replace, some
from tests.report.fabricate_experiment import KEPT

FASTER_BY = [0.70, 0.72, 0.73, 0.71, 0.74]
SOURCES = ("GPU by counter",)


def drew(joules: float | None, label: str, mean_ms: float = 100.0, **more: Any) -> Measure:
    """A run of 32 samples a step."""
    known = {} if joules is None else {"joules_per_step": joules, "joules_per_sample": joules / 32}
    usual = {"energy_sources": SOURCES if joules is not None else (), "energy_absent": None if joules else "no counter"}
    return measure(mean_ms, label, **{**usual, **known, **more})


def pairs(ratios: Sequence[float | None], times: Sequence[float] = FASTER_BY, **more: Any) -> list[Any]:
    return [
        (drew(20.0, f"A{n}"), drew(None if ratio is None else 20 * ratio, f"B{n}", 100 * time, **more))
        for n, (ratio, time) in enumerate(zip(ratios, times, strict=True))
    ]


def outcome(given: Sequence[tuple[Measure, Measure]], candidates: int = 1) -> Outcome:
    return outcomes.outcome([Knob("compile", "true")], given, Limits(), candidates=candidates)


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
    found = outcome(pairs(ratios))
    said = some(found.energy)
    assert (found.verdict.word, said.word, said.figure) == (FASTER, word, "joules_per_sample")
    assert said.text.startswith(text)
    assert ("time falls but energy does not" in said.text) == (word in (MORE, NO_DIFFERENCE))
    assert set(found.effects) >= {"mean_ms", "joules_per_sample"}
    assert "joules_per_step" not in found.effects


def test_a_batch_that_is_not_known_is_compared_by_the_step() -> None:
    given = pairs([0.8] * 5, joules_per_sample=None)
    found = some(outcome(given).energy)
    assert (found.figure, found.text.partition(" by ")[0]) == ("joules_per_step", "less energy a step")


def test_what_one_side_lacks_is_said_and_not_compared() -> None:
    lacking = some(outcome(pairs([0.8, 0.8, None, 0.8, 0.8])).energy)
    assert (lacking.word, lacking.text) == (UNDECIDED, "energy is not compared: B2: no counter")
    other = some(outcome(pairs([0.8] * 5, energy_sources=(*SOURCES, "processors by RAPL"))).energy)
    assert "GPU by counter against GPU by counter, processors by RAPL" in other.text
    nothing = some(outcome(pairs([0.0, 0.8, 0.8, 0.8, 0.8])).energy)
    assert nothing.text == "energy is not compared: a run drew nothing a sample"
    neither = [(measure(100.0, "A"), measure(90.0, "B"))]
    assert outcome(neither).energy is None  # nobody looks for it there


def test_many_candidates_find_energy_by_chance_no_sooner() -> None:
    """Of 40 candidates one that is barely certain alone says nothing, before and after all of them are seen."""
    given = pairs([0.97, 0.99, 0.975, 0.985, 0.98], [1.0, 1.01, 0.99, 1.0, 1.0])
    assert some(outcome(given).energy).word == LESS
    assert some(outcome(given, candidates=40).energy).word == UNDECIDED
    many = outcomes.corrected([outcome(given, candidates=40) for _ in range(40)], Limits())
    assert {some(one.energy).word for one in many} == {UNDECIDED}


def test_an_experiment_keeps_and_shows_what_energy_says() -> None:
    kept = replace(KEPT, tried=(replace(KEPT.tried[0], outcome=outcome(pairs([0.8] * 5))),))
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
    assert some(outcome(given).energy).text.endswith("at your prices 1,000 steps cost 15 % less")
