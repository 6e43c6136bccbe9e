"""Screening: which knobs take part, in which order, what each does, and which combination is worth confirming."""

from __future__ import annotations

import math
import random

import pytest

from stepscope.experiment import screening
from stepscope.experiment.plan import candidate_of
from stepscope.model.experiment import Candidate
from stepscope.schema import Knob
from tests.report.fabricate_experiment import measure


def candidate(*texts: str, ceiling: float | None = None, finding: str | None = None) -> Candidate:
    found = candidate_of([Knob(*text.split("=")) for text in texts])
    return Candidate(found.name, found.knobs, ceiling, finding)


def names(candidates: tuple[Candidate, ...]) -> list[str]:
    return [one.name for one in candidates]


THREE = (candidate("loader.num_workers=2"), candidate("torch.num_threads=2"), candidate("gc=off"))


def test_a_knob_takes_part_with_its_first_value() -> None:
    found, skipped = screening.factors((*THREE, candidate("loader.num_workers=4")))

    assert found == THREE
    assert [(one.name, one.reason) for one in skipped] == [
        ("loader.num_workers=4", "takes part in the screening as loader.num_workers=2, which excludes it")
    ]


def test_what_needs_workers_goes_with_them() -> None:
    given = (candidate("loader.persistent_workers=true"), *THREE, candidate("loader.prefetch_factor=4"))
    found, skipped = screening.factors(given)

    assert names(found)[0] == "loader.num_workers=2 + loader.persistent_workers=true + loader.prefetch_factor=4"
    assert len(found) == 3
    assert skipped == ()
    assert len(screening.factors(given, workers=2)[0]) == 5, "the script has workers of its own"


def test_knobs_that_exclude_each_other_do_not_meet() -> None:
    found, skipped = screening.factors((candidate("optimizer.fused=true"), candidate("optimizer.foreach=true")))

    assert names(found) == ["optimizer.fused=true"]
    assert names(skipped) == ["optimizer.foreach=true"]


def test_more_knobs_than_a_design_holds_are_left_out_with_a_reason() -> None:
    many = tuple(candidate(f"env:NAME_{number}=1") for number in range(13))
    found, skipped = screening.factors(many)

    assert len(found) == 11
    assert {one.reason for one in skipped} == {"a screening takes 11 knobs at most"}


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 11])
def test_a_design_is_balanced_and_its_order_is_the_seeds(count: int) -> None:
    rows = screening.design(count, seed=5)

    assert rows == screening.design(count, seed=5)
    assert sorted(rows) == sorted(screening.design(count, seed=6))
    assert any(screening.design(count, seed=seed) != rows for seed in range(20))
    for knob in range(count):
        assert 2 * sum(row[knob] for row in rows) == len(rows)


def rows_of(effects: dict[int, float], count: int, *, blocks: int = 2, drift: float = 0.0) -> list[screening.Row]:
    """Runs of 100 ms whose knobs multiply the step time, with 1 % of noise and a machine that drifts."""
    draw = random.Random(2)
    rows: list[screening.Row] = []
    for block in range(blocks):
        for levels in screening.design(count, seed=0):
            log = math.log(100.0) + draw.gauss(0, 0.01) + drift * block
            log += sum(math.log(ratio) for knob, ratio in effects.items() if levels[knob])
            rows.append((levels, block, measure("run", math.exp(log))))
    return rows


def test_main_effects_find_what_each_knob_does() -> None:
    effects = screening.main_effects(THREE, rows_of({0: 0.7, 2: 1.1}, 3, drift=0.3))

    assert [effect.knob for effect in effects] == [one.knobs[0] for one in THREE]
    for effect, truth in zip(effects, (0.7, 1.0, 1.1), strict=True):
        assert effect.low is not None
        assert effect.high is not None
        assert effect.low < truth < effect.high
        assert effect.high - effect.low < 0.06
        assert effect.runs == 16


def test_the_best_combination_holds_what_helps_and_says_why_not_the_others() -> None:
    chosen = (
        candidate("loader.num_workers=2", "loader.persistent_workers=true", ceiling=0.4, finding="a"),
        candidate("torch.num_threads=2", ceiling=0.3, finding="b"),
        candidate("gc=off", ceiling=0.1, finding="c"),
        candidate("compile=true", ceiling=0.1, finding="d"),
    )
    found = screening.screened(chosen, rows_of({0: 0.9, 1: 0.8, 2: 1.2}, 4))

    assert found.candidate is not None
    assert found.candidate.name == "torch.num_threads=2 + loader.num_workers=2 + loader.persistent_workers=true"
    assert found.candidate.ceiling == pytest.approx(0.7)
    reasons = {one.name: one.reason for one in found.skipped}
    assert reasons["gc=off"].startswith("not in the combination: it makes a step longer by ")
    assert reasons["compile=true"].startswith("not in the combination: it makes no difference that shows (95 %: -")
    assert found.effects[0].with_knobs == (Knob("loader.persistent_workers", "true"),)
    assert found.effects[0].ceiling == 0.4


def test_two_knobs_of_one_finding_share_its_ceiling() -> None:
    chosen = tuple(candidate(text, ceiling=0.4, finding="a") for text in ("loader.num_workers=2", "gc=off"))
    found = screening.screened(chosen, rows_of({0: 0.8, 1: 0.9}, 2, blocks=3))

    assert found.candidate is not None
    assert (found.candidate.ceiling, found.candidate.finding) == (0.4, "a")


def test_where_nothing_helps_there_is_no_combination() -> None:
    found = screening.screened(THREE, rows_of({}, 3))

    assert found.candidate is None
    assert len(found.skipped) == 3


def test_an_effect_that_does_not_matter_is_not_in_the_combination() -> None:
    found = screening.screened(THREE, rows_of({0: 0.93}, 3), threshold=0.1)

    assert found.candidate is None
    reasons = {one.name: one.reason for one in found.skipped}
    assert reasons["loader.num_workers=2"].startswith("not in the combination: it gains ")


def test_runs_that_are_too_few_give_no_combination() -> None:
    found = screening.screened(THREE, rows_of({0: 0.5}, 3)[:2])

    assert found.candidate is None
    assert len(found.skipped) == 3
