"""Two-level designs: balanced and orthogonal; main effects exact without noise, covered by their intervals with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import UsageError
from stepscope.experiment.screening import MOST_KNOBS, Levels, design_rows, factor_effects

Run = tuple[Levels, int, float]


def replicated(effects: list[float], blocks: list[float], noise: float, seed: int = 0) -> list[Run]:
    """Runs of every block's replicate; `effects` are on logs, `blocks` shift all runs of a block."""
    rng = np.random.default_rng(seed)
    return [
        (levels, block, 100 * math.exp(shift + sum(np.where(levels, effects, 0.0)) + noise * rng.standard_normal()))
        for block, shift in enumerate(blocks)
        for levels in design_rows(len(effects))
    ]


@pytest.mark.parametrize("knobs", range(1, MOST_KNOBS + 1))
def test_columns_are_balanced_and_orthogonal(knobs: int) -> None:
    signs = np.array([[1 if on else -1 for on in levels] for levels in design_rows(knobs)])
    assert signs.shape[1] == knobs
    assert (signs.T @ signs == len(signs) * np.eye(knobs)).all()
    assert (signs.sum(axis=0) == 0).all()


@pytest.mark.parametrize(("knobs", "runs"), [(1, 2), (2, 4), (3, 8), (4, 8), (7, 8), (8, 12), (11, 12)])
def test_runs_of_a_replicate(knobs: int, runs: int) -> None:
    found = design_rows(knobs)
    assert len(found) == len(set(found)) == runs
    assert (False,) * knobs in found


@pytest.mark.parametrize("knobs", [0, -1, 12, 100])
def test_too_many_knobs_are_refused(knobs: int) -> None:
    with pytest.raises(UsageError, match="1 to 11 knobs"):
        design_rows(knobs)


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
            assert effect.low is not None
            assert effect.high is not None
            covered.append(effect.low <= math.exp(truth) <= effect.high)
    assert 0.90 < np.mean(covered) < 0.99


def test_one_replicate_of_all_combinations_of_one_knob_has_no_interval() -> None:
    (found,) = factor_effects([((False,), 0, 100.0), ((True,), 0, 90.0)])
    assert found is not None
    assert found.ratio == pytest.approx(0.9)
    assert (found.low, found.high, found.p_value) == (None, None, None)


def test_lost_runs_cost_width_and_not_truth() -> None:
    runs = replicated([0.1, -0.2, 0.0, 0.05], [0.0, 0.3], 0.0)
    found = factor_effects([run for number, run in enumerate(runs) if number not in {2, 11}])
    for effect, truth in zip(found, [0.1, -0.2, 0.0, 0.05], strict=True):
        assert effect is not None
        assert math.log(effect.ratio) == pytest.approx(truth, abs=1e-9)


def test_what_the_runs_cannot_tell_is_none() -> None:
    """Knob 0 was on in no run that is left."""
    runs = [run for run in replicated([0.1, -0.2], [0.0, 0.0], 0.0) if not run[0][0]]
    first, second = factor_effects(runs)
    assert first is None
    assert second is not None
    assert second.ratio == pytest.approx(math.exp(-0.2))


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
