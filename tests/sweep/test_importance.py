"""Which parameter decides a metric: never an inert one, and nothing of too few trials."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import optuna
import pytest

from stepscope.model.sweep import FAILED, FINISHED, PED_ANOVA, SURFACE, Importance, Objective, Parameter, Trial
from stepscope.sweep.importance import importance
from tests.records import some

RANGES = tuple(Parameter(name, 0.0, 1.0) for name in ("inert", "one", "other"))
LOSS = (Objective("loss"),)
optuna.logging.set_verbosity(optuna.logging.ERROR)


def quadratic(one: float, other: float, **_: float) -> float:
    return (one - 0.3) ** 2 + (other - 0.7) ** 2


def searched(sampler: str, seed: int, count: int = 24) -> list[Trial]:
    made = optuna.samplers.TPESampler if sampler == "tpe" else optuna.samplers.RandomSampler
    study = optuna.create_study(sampler=made(seed=seed))
    study.optimize(
        lambda trial: quadratic(**{param.name: trial.suggest_float(param.name, 0, 1) for param in RANGES}), count
    )
    return [
        Trial(number=trial.number, state=FINISHED, params=trial.params, value=trial.value, values=tuple(trial.values))
        for trial in study.trials
    ]


@pytest.mark.parametrize("sampler", ["tpe", pytest.param("random", marks=pytest.mark.thorough)])
def test_an_inert_parameter_comes_last_and_is_not_called_important(sampler: str) -> None:
    found = [importance(RANGES, searched(sampler, seed), LOSS, 0, seed) for seed in range(20)]
    assert sum(each.rows[-1].param == "inert" for each in found) >= 18
    assert sum("inert" not in each.important for each in found) >= 18
    assert sum({"one", "other"} <= set(each.important) for each in found) >= 14  # and is no excuse to rank nothing
    assert {each.method for each in found} == {SURFACE}
    assert all(row.low <= row.importance <= row.high for each in found for row in each.rows)


def test_many_trials_are_ranked_by_ped_anova() -> None:
    found = importance(RANGES, searched("tpe", 0, 50), LOSS, 0, 0)
    assert found.method == PED_ANOVA
    assert found.rows[-1].param == "inert"
    assert "inert" not in found.important
    assert math.fsum(row.importance for row in found.rows) == pytest.approx(1.0)


def made(count: int, params: Sequence[Parameter], reach: Callable[[dict[str, float]], float]) -> Importance:
    chance = np.random.default_rng(3)
    trials = []
    for number in range(count):
        values: dict[str, float | str] = {}
        for param in params:
            ends = (math.log(param.low or 1), math.log(param.high or 1)) if param.log else (param.low, param.high)
            drawn = str(chance.choice(param.choices)) if param.choices else float(chance.uniform(*ends))  # type: ignore[arg-type]
            values[param.name] = math.exp(drawn) if param.log else drawn  # type: ignore[arg-type]
        numbers = {name: value if isinstance(value, float) else len(value) for name, value in values.items()}
        trials.append(Trial(number=number, state=FINISHED, params=values, values=(reach(numbers),)))
    trials.append(Trial(number=count, state=FAILED, params={param.name: 0.5 for param in params}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return importance(params, trials, LOSS, 0, 0)


def test_too_few_trials_rank_nothing() -> None:
    found = made(11, RANGES, lambda at: at["one"])
    assert (found.rows, found.important, found.trials) == ((), (), 11)
    assert found.note == "too few to rank: 11 finished trials, 12 are needed (4 for each parameter)"
    assert made(12, RANGES, lambda at: at["one"]).rows[0].param == "one"
    assert "nothing to rank" in str(made(12, RANGES, lambda _: 1.0).note)


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_a_trial_that_diverged_does_not_decide_alone(scale: float) -> None:
    numbers = iter(range(24))
    found = made(24, RANGES, lambda at: scale * (1e7 if next(numbers) == 5 else at["one"]))
    assert found.rows[0].param == "one"
    assert set(found.important) <= {"one"}


def test_the_contour_of_the_first_pair_is_the_surface_over_it_in_the_metrics_own_unit() -> None:
    params = (
        Parameter("lr", 1e-4, 1e-2, log=True),
        Parameter("size", choices=("100", "1", "10")),
        Parameter("other", 0.0, 1.0),
        Parameter("kind", choices=("a", "bb")),
    )

    def reach(at: dict[str, float]) -> float:
        lr, size = math.log10(at["lr"]) + 3, at["size"] - 2  # its digits
        return 500 + 40 * lr + 30 * lr**2 + 20 * lr * size + 3 * at["other"]

    found = made(45, params, reach)
    (pair,) = found.pairs
    contour = some(found.contour)
    assert (contour.first, contour.second) == (pair.first, pair.second) == ("lr", "size")
    assert contour.y == ("1", "10", "100")
    assert contour.explained > 0.9
    for size, row in zip(contour.y, contour.values, strict=True):
        for lr, value in zip(contour.x, row, strict=True):
            assert value == pytest.approx(reach({"lr": float(lr), "size": len(str(size)), "other": 0.5}), abs=6)
    words = made(
        40, (Parameter("kind", choices=("a", "bb")), Parameter("x", 0.0, 1.0)), lambda at: at["kind"] * at["x"]
    )
    assert words.contour is not None
    assert {words.contour.first, words.contour.second} == {"kind", "x"}
    alone = made(12, (Parameter("x", 0.0, 1.0),), lambda at: at["x"])
    assert alone.contour is None
    many = made(60, RANGES, lambda at: quadratic(**at))  # PED-ANOVA ranks, the surface is drawn all the same
    assert (many.method, many.contour is not None) == (PED_ANOVA, True)


def test_more_is_better_turns_no_contour_over() -> None:
    found = [
        importance(RANGES, searched("random", 0), (Objective("loss", direction),), 0, 0) for direction in ("min", "max")
    ]
    low, high = (each.contour for each in found)
    assert low is not None
    assert high is not None
    assert low.values == pytest.approx(np.array(high.values))
