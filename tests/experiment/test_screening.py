"""Screening: which knobs take part, in which order, what each does, and which combination is worth confirming."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.experiment import screening
from stepscope.experiment.plan import candidate_of
from stepscope.experiment.screening import MOST_KNOBS, Levels, design, factor_effects
from stepscope.model.comparison import Candidate
from stepscope.schema import Knob
from tests.records import some


def candidate(*texts: str, ceiling: float | None = None, finding: str | None = None) -> Candidate:
    found = candidate_of([Knob(*text.split("=")) for text in texts])
    return Candidate(found.name, found.knobs, ceiling, finding)


THREE = (candidate("loader.num_workers=2"), candidate("torch.num_threads=2"), candidate("gc=off"))


LOADER = ("loader.num_workers=2", "loader.persistent_workers=true", "loader.prefetch_factor=4")
MANY = [f"env:NAME_{number}=1" for number in range(13)]
AS_RIVAL = "takes part in the screening as {}, which excludes it"


@pytest.mark.parametrize(
    ("knobs", "kept", "skipped", "reason"),
    [
        # a knob takes part with its first value
        (["gc=off", "gc=freeze"], ["gc=off"], ["gc=freeze"], AS_RIVAL.format("gc=off")),
        # what needs workers goes with them
        ([LOADER[1], LOADER[0], "gc=off", LOADER[2]], [" + ".join(LOADER), "gc=off"], [], ""),
        (
            ["optimizer.fused=true", "optimizer.foreach=true"],
            ["optimizer.fused=true"],
            ["optimizer.foreach=true"],
            AS_RIVAL.format("optimizer.fused=true"),
        ),
        (MANY, MANY[:11], MANY[11:], "a screening takes 11 knobs at most"),
    ],
)
def test_who_takes_part(knobs: list[str], kept: list[str], skipped: list[str], reason: str) -> None:
    found, others = screening.factors([candidate(knob) for knob in knobs])
    assert [one.name for one in found] == kept
    assert [(one.name, one.reason) for one in others] == [(name, reason) for name in skipped]


def rows_of(effects: dict[int, float], count: int) -> list[screening.Row]:
    """Two blocks of runs of 100 ms whose knobs multiply the step time, with 1 % of noise."""
    draw = random.Random(2)
    rows: list[screening.Row] = []
    for block in range(2):
        for levels in design(count, seed=0):
            log = math.log(100.0) + draw.gauss(0, 0.01)
            log += sum(math.log(ratio) for knob, ratio in effects.items() if levels[knob])
            rows.append((levels, block, math.exp(log)))
    return rows


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


def test_an_effect_that_does_not_matter_is_not_in_the_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screening, "THRESHOLD", 0.1)
    found = screening.screened(THREE, rows_of({0: 0.93}, 3))

    assert found.candidate is None
    reasons = {one.name: one.reason for one in found.skipped}
    assert reasons["loader.num_workers=2"].startswith("not in the combination: it gains ")


def test_runs_that_are_too_few_give_no_combination() -> None:
    found = screening.screened(THREE, rows_of({0: 0.5}, 3)[:2])

    assert found.candidate is None
    assert len(found.skipped) == 3


Run = tuple[Levels, int, float]


def replicated(effects: list[float], blocks: list[float], noise: float, seed: int = 0) -> list[Run]:
    """Runs of every block's replicate; `effects` are on logs, `blocks` shift all runs of a block."""
    rng = np.random.default_rng(seed)
    return [
        (levels, block, 100 * math.exp(shift + sum(np.where(levels, effects, 0.0)) + noise * rng.standard_normal()))
        for block, shift in enumerate(blocks)
        for levels in design(len(effects), seed=0)
    ]


@pytest.mark.parametrize("knobs", range(1, MOST_KNOBS + 1))
def test_columns_are_balanced_and_orthogonal_and_their_order_is_the_seeds(knobs: int) -> None:
    found = design(knobs, seed=5)
    assert found == design(knobs, seed=5)
    assert any(design(knobs, seed=seed) != found for seed in range(20))
    assert (False,) * knobs in found
    signs = np.array([[1 if on else -1 for on in levels] for levels in found])
    assert signs.shape[1] == knobs
    assert (signs.T @ signs == len(signs) * np.eye(knobs)).all()
    assert (signs.sum(axis=0) == 0).all()


@given(
    st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=MOST_KNOBS), st.lists(st.floats(-1, 1), min_size=2, max_size=3)
)
def test_without_noise_main_effects_are_exact(effects: list[float], blocks: list[float]) -> None:
    found = factor_effects(replicated(effects, blocks, 0.0))
    for effect, truth in zip(found, effects, strict=True):
        assert effect is not None
        assert math.log(effect.ratio) == pytest.approx(truth, abs=1e-9)


@pytest.mark.parametrize("knobs", [2, 5, 9])
def test_intervals_cover_what_is_true(knobs: int) -> None:
    """95 % of them; of 200 simulated screenings with as many effects each."""
    effects = [0.05 * (-1) ** knob for knob in range(knobs)]
    covered = []
    for seed in range(200):
        for effect, truth in zip(factor_effects(replicated(effects, [0.0, 0.04], 0.02, seed)), effects, strict=True):
            assert effect is not None
            covered.append(some(effect.low) <= math.exp(truth) <= some(effect.high))
    assert 0.90 < np.mean(covered) < 0.99


def test_one_replicate_of_all_combinations_of_one_knob_has_no_interval() -> None:
    (found,) = factor_effects([((False,), 0, 100.0), ((True,), 0, 90.0)])
    assert found is not None
    assert found.ratio == pytest.approx(0.9)
    assert (found.low, found.high, found.p_value) == (None, None, None)


def test_odd_figures_are_left_out() -> None:
    runs = replicated([0.1], [0.0, 0.0, 0.0], 0.0)
    levels, block, _ = runs[0]
    for odd in (math.nan, math.inf, 0.0, -1.0):
        (found,) = factor_effects([(levels, block, odd), *runs[1:]])
        assert found is not None
        assert found.ratio == pytest.approx(math.exp(0.1))
        assert found.pairs == 5
    assert factor_effects([]) == []
    assert factor_effects([((True, False), 0, math.nan)]) == [None, None]
