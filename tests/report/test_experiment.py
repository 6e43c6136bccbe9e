"""An experiment as document and on a terminal: what wins, by how much, what to write, and what no knob reaches."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stepscope.model.comparison import Effect, Outcome, Verdict
from stepscope.report import comparison_report, experiment_report
from stepscope.schema import Knob
from tests.records import replace
from tests.report.fabricate_experiment import (
    BY_HAND,
    REPEAT,
    equal,
    experiment,
    faster,
    hostile,
    screening,
    self_test,
    shown,
    undecided,
    void,
)
from tests.report.test_terminal import HOSTILE, words_of

GOLDEN = Path(__file__).with_name("golden_experiment.json")
KEYS = ("schema", "baseline", "candidates")
CANDIDATE_KEYS = ("knobs", "verdict", "effect", "pairs", "flags", "phases")


def test_a_win_is_said_with_its_interval_its_cause_and_its_line() -> None:
    text = shown(experiment(), page="/somewhere/report.html")
    lines, flat = text.splitlines(), words_of(text)

    assert lines[0] == "Experiment: python train.py --lr 0.1"
    assert (
        "loader.num_workers=2 + persistent_workers=true makes training faster: 38 % (95 %: 36 to 40 %), 3 pairs."
        in flat
    )
    assert "faster -38 % (-40 to -36 %) 3 -57 %" in flat
    assert "Step data wait 21.6 → 0.40 ms" in flat
    assert "61.6 → 38.2 · 62.0 → 38.4 · 61.2 → 38.0" in flat
    assert "What to change train.py:77: DataLoader(..., num_workers=2, persistent_workers=True)" in flat
    assert "trains alike: its loss differs by 1.2 %" in flat
    assert "loader.workers=4: 'loader.workers' is no knob" in flat
    assert any(line.endswith(REPEAT) for line in lines), "one line, to be copied"
    assert lines[-1].split() == ["everything", "/somewhere/report.html"]


def test_every_verdict_is_in_words() -> None:
    flat = words_of(shown(experiment()))

    assert "torch.num_threads=2 no difference +0.3 % (-1.2 to +1.8 %) 5 -20 %" in flat
    assert "optimizer.fused=true undecided -3 % (-9 to +3 %)" in flat
    assert "compile=true void – 0" in flat
    assert "no difference larger than 1.8 %, 5 pairs" in flat
    assert "about 4 more pairs needed" in flat
    assert "compile=true was not applied: no model was called" in flat
    assert "other processes took 0.4 cores" in flat


def test_the_fastest_stands_first_and_the_void_last() -> None:
    names = [
        experiment_report.name(row)
        for row in experiment_report.ranked(experiment_report.experiment_document(experiment()))
    ]

    assert names[0].startswith("loader.num_workers")
    assert names[-1] == "compile=true"


def test_step_times_and_rates_are_ranked_together() -> None:
    winner = faster()
    effects = {"mean_ms": Effect(1.6, 1.5, 1.7, 3), "samples_per_second": Effect(1.25, 1.2, 1.3, 3)}
    batch = replace(
        winner,
        candidate=replace(winner.candidate, knobs=(Knob("arg:--batch-size", "128"),)),
        outcome=replace(
            winner.outcome,
            knobs=(Knob("arg:--batch-size", "128"),),
            headline="samples_per_second",
            effects=effects,
        ),
    )
    rows = experiment_report.winners(experiment_report.experiment_document(experiment(tried=(batch, winner))))

    assert [experiment_report.change(row) for row in rows] == ["-38 % (-40 to -36 %)", "+25 % (+20 to +30 %)"]


def test_where_no_knob_helps_it_says_so_and_names_the_line() -> None:
    flat = words_of(shown(experiment(tried=(equal(),), by_hand=(BY_HAND,), notes=("No finding names a knob.",))))

    assert "! No finding names a knob." in flat
    assert "No knob helps: of 1 tried, 1 no difference." in flat
    assert (
        "What the step loses most to is at train.py:66, which no knob reaches: A Python loop calls cross_entropy 256 "
        "times per step (61 % of the step at most). By hand: Call it once on the whole tensor."
    ) in flat
    assert "What to change" not in flat


def test_what_only_an_edit_removes_is_said_beside_a_win() -> None:
    other = replace(BY_HAND, title="torch.save inside the step", line=90)
    text = shown(experiment(tried=(faster(),), by_hand=(BY_HAND, other)))
    flat = words_of(text)

    assert "What the step loses most to is at train.py:66, which only an edit removes: A Python loop" in flat
    assert "What no knob reaches either train.py:90: torch.save inside the step (61 % of the step at most)." in flat
    assert flat.count("A Python loop") == 1


def test_an_undecided_candidate_is_not_said_to_be_of_no_help() -> None:
    flat = words_of(shown(experiment(tried=(equal(), undecided()))))

    assert "No knob is shown to help: of 2 tried, 1 no difference, 1 undecided." in flat


def test_candidates_that_are_all_void_were_not_judged() -> None:
    assert "No candidate could be judged" in words_of(shown(experiment(tried=(void(),))))


def test_a_gain_beyond_its_ceiling_is_held_against_the_diagnosis() -> None:
    winner = faster()
    low = replace(winner, candidate=replace(winner.candidate, ceiling=0.2))

    assert "more than the diagnosis held possible (20 % at most)" in words_of(shown(experiment(tried=(low,))))
    assert "held possible" not in shown(experiment(tried=(winner,)))


def test_another_batch_size_is_compared_by_samples() -> None:
    winner = faster()
    outcome = replace(
        winner.outcome,
        headline="samples_per_second",
        verdict=Verdict("faster", "faster: 20 % more samples per second (95 %: 18 to 22 %), 3 pairs"),
        effects={**winner.outcome.effects, "samples_per_second": Effect(1.2, 1.18, 1.22, 3)},
    )
    flat = words_of(shown(experiment(tried=(replace(winner, outcome=outcome),))))

    assert "Samples a second (95 %)" in flat
    assert "faster +20 % (+18 to +22 %)" in flat
    assert "makes training faster: 20 % more samples per second" in flat
    assert "convergence is not judged" in flat


def test_main_effects_stand_beside_what_was_predicted() -> None:
    flat = words_of(shown(screening()))

    assert "Main effects" in flat
    assert "loader.num_workers=2 + persistent_workers=true -34 % (-36 to -32 %) 8 -57 %" in flat
    assert "torch.num_threads=2 +1 % (-2 to +4 %) 8 –" in flat


def test_a_screening_without_a_combination_says_so() -> None:
    flat = words_of(shown(replace(screening(), tried=())))

    assert "No knob is shown to help: none of 2 in the screening, so there is no combination to confirm." in flat


def test_an_experiment_that_was_stopped_before_its_pairs_shows_what_it_has() -> None:
    stopped = replace(screening(), tried=(), finished=False, stopped="the budget of 4 minutes is spent", runs=8)
    flat = words_of(shown(stopped))
    assert "Nothing is confirmed: the experiment was stopped after 8 runs" in flat
    assert "2 of its knobs show below what they do" in flat
    assert "Main effects" in flat
    assert "too few to tell what a knob does" in words_of(shown(replace(stopped, effects=())))


def test_a_self_test_says_what_the_machine_can_show() -> None:
    flat = words_of(shown(self_test()))

    assert "With 6 pairs this machine shows effects from 2.3 % on" in flat
    assert "governor powersave" in flat
    assert "Nothing was tried" not in flat


def test_an_unfinished_experiment_says_how_it_goes_on() -> None:
    flat = words_of(shown(experiment(finished=False, stopped="the budget of 5 minutes is spent")))

    assert "! not finished (the budget of 5 minutes is spent): the same command goes on" in flat


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_but_what_is_copied_is_wider_than_the_screen(width: int) -> None:
    lines = shown(experiment(by_hand=(BY_HAND,)), width=width).splitlines()
    end = next(number for number, line in enumerate(lines) if line.startswith("Next"))

    assert max(map(len, lines[:end])) <= width
    assert not [line for line in lines if line != line.rstrip()]


def test_long_names_stay_whole_on_a_small_screen() -> None:
    lines = shown(experiment(), width=80).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("loader.num_workers=2  "))

    assert words_of(lines[at]) == "loader.num_workers=2 faster -38 % (-40 to -36 %) 3 -57 %"
    assert lines[at + 1] == "  + persistent_workers=true"


@pytest.mark.parametrize(
    ("source", "text"),
    [("findings", "from the findings of the first run"), ("/runs/one", "from the findings of /runs/one"), (None, None)],
)
def test_it_says_where_candidates_are_from(source: str | None, text: str | None) -> None:
    flat = words_of(shown(experiment(source=source)))

    assert "candidates from" in flat if text else "candidates from" not in flat
    assert (text or "") in flat


def test_it_is_the_same_every_time() -> None:
    assert shown(experiment()) == shown(experiment())


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_hostile_texts_are_shown_and_not_obeyed(tmp_path: Path, encoding: str) -> None:
    text = shown(hostile(HOSTILE, tmp_path), encoding=encoding)

    assert "<script>x</script>" in text
    controls = [letter for letter in text if unicodedata.category(letter) in ("Cc", "Cf", "Cs") and letter != "\n"]
    assert controls == []


def test_a_plain_terminal_gets_plain_arrows() -> None:
    text = shown(experiment(), encoding="ascii")

    assert "61.6 -> 38.2" in text
    assert "\\u" not in text


@pytest.mark.parametrize(
    ("knobs", "name"),
    [
        ((), "baseline again"),
        ((Knob("env:A.B", "1"), Knob("env:A.C", "2")), "env:A.B=1 + env:A.C=2"),
        ((Knob("loader.num_workers", "2"), Knob("gc", "off")), "loader.num_workers=2 + gc=off"),
        ((Knob("arg:--a", "x y"),), "arg:--a=x y"),
    ],
)
def test_names_of_candidates(knobs: tuple[Knob, ...], name: str) -> None:
    row: Mapping[str, Any] = {"knobs": [{"knob": knob.knob, "value": knob.value} for knob in knobs]}
    assert experiment_report.name(row) == name


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.62, "-38 %"), (1.021, "+2.1 %"), (1.0, "0 %"), (0.9996, "-0.04 %"), (2.5, "+150 %"), (0.9, "-10 %")],
)
def test_ratios_are_said_as_changes(ratio: float, text: str) -> None:
    assert comparison_report.signed_percent(ratio) == text


def test_a_verdict_that_rests_on_the_median_shows_the_median() -> None:
    effects = {"mean_ms": Effect(0.98, 0.94, 1.02, 6), "median_ms": Effect(0.97, 0.96, 0.98, 6)}
    verdict = Verdict("faster", "faster by 3 % by the median step", figure="median_ms")
    row = comparison_report.outcome_document(Outcome((), verdict, effects, (), ()))
    assert row["decided_by"] == "median_ms"
    assert experiment_report.change(row) == "median -3 % (-4 to -2 %)"
    plain = comparison_report.outcome_document(Outcome((), replace(verdict, figure=None), effects, (), ()))
    assert plain["decided_by"] == "mean_ms"
    assert experiment_report.change(plain) == "-2 % (-6 to +2 %)"
