"""Which parameters decide what a sweep's trials reach, with an interval, and what correlates with it.

The best tenth of many trials is compared with all of them (PED-ANOVA). Of few trials a surface is fitted: each
parameter's line and curve, and the products of pairs. A parameter's importance is the share of the surface's and the
residual's variance in the terms it is part of, over the range that was searched. Both are made again with trials drawn
anew (the interval), and with the values of a parameter dealt out anew among the trials (what an inert one gets).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from stepscope.model.sweep import (
    FINISHED,
    MINIMUM,
    PED_ANOVA,
    SURFACE,
    Contour,
    Importance,
    Objective,
    Pair,
    Parameter,
    ParameterImportance,
    Trial,
    Value,
)
from stepscope.sweep.space import levels
from stepscope.sweep.study import ped_anova
from stepscope.tables.arrays import Floats

# Limits, chosen by simulation: quadratics in two parameters beside an inert third, of equal or a quarter's weight, with
# and without noise, 12 to 60 trials, 20 seeds each (tests/sweep/test_importance.py keeps the main case).
TRIALS_PER_PARAMETER = 4  # finished ones; with fewer the inert parameter came last in half of the seeds only
# PED-ANOVA compares the best tenth of the trials with all of them, and asks for five in that tenth. With 24 trials it
# put the inert parameter last in 15 to 19 of 20 seeds, the surface in 19 or 20; from 50 on both do.
PED_ANOVA_TRIALS = 50
TERMS_SHARE = 0.5  # of the trials: a surface with more terms follows chance, so products of pairs are left out
RIDGE = 0.02  # of the number of trials; samplers crowd around the optimum, where line and curve look alike
FAR_OUT = 3.0  # interquartile ranges beyond the quartiles (Tukey's far out): one that diverged must not decide alone
RESAMPLES = 200  # of the trials, and of an inert parameter's values; ends of intervals move by a few percent
CONFIDENCE = 0.95
INERT = 0.95  # of the shares that values dealt out anew get; an inert parameter passes once in twenty sweeps
LEAST_SHARE = 0.05  # a parameter or a pair that decides less is not worth a trial, however certain it is
CONTOUR_CELLS = 24  # along a side of the map of the first pair: a surface of second degree has no finer detail


class _Scale(NamedTuple):
    """A parameter's values as numbers. `units` go from 0 to 1; `codes` counts choices without an order, 0 for others.

    `numbers` are what correlations are of, None where the values are no numbers.
    """

    units: Floats
    codes: int
    levels: Floats | None  # all units there are, None of a range
    numbers: Floats | None


def importance(
    params: Sequence[Parameter], trials: Sequence[Trial], objectives: Sequence[Objective], at: int, seed: int
) -> Importance:
    """What decides the metric at place `at`."""
    objective = objectives[at]
    done = [trial for trial in trials if trial.state == FINISHED]
    needed = TRIALS_PER_PARAMETER * len(params)
    if len(done) < needed:
        each = f"{TRIALS_PER_PARAMETER} for each parameter"
        note = f"too few to rank: {len(done)} finished trials, {needed} are needed ({each})"
        return Importance(metric=objective.name, trials=len(done), note=note)
    reached = np.array([trial.values[at] for trial in done], np.float64)
    largest = float(np.abs(reached).max()) or 1.0
    reached = reached / largest  # shares and correlations have no unit, and squares a limit
    if np.ptp(reached) == 0:
        note = f"nothing to rank: {objective.name} is the same in all {len(done)} finished trials"
        return Importance(metric=objective.name, trials=len(done), note=note)
    scales = [_scale(param, [trial.params[param.name] for trial in done]) for param in params]
    many = len(done) >= PED_ANOVA_TRIALS
    estimate = _ped_anova if many else _surface
    low, high = np.percentile(reached, [25, 75])
    far = FAR_OUT * (high - low)
    clipped = np.clip(reached, low - far, high + far) if far > 0 else reached
    sign = 1.0 if objective.direction == MINIMUM else -1.0
    clipped = sign * clipped
    shares, intervals, important = _judged(estimate, scales, clipped, seed)
    rows = [
        ParameterImportance(param.name, share, *interval, *_correlations(scale.numbers, reached))
        for param, scale, share, interval in zip(params, scales, shares, intervals, strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda number: -rows[number].importance)
    fit = _fitted(scales, clipped)
    ranked = _pairs(fit)
    first = sorted(ranked[0][0] if ranked else order[:2], key=order.index)
    return Importance(
        metric=objective.name,
        trials=len(done),
        method=PED_ANOVA if many else SURFACE,
        rows=tuple(rows[number] for number in order),
        important=tuple(rows[number].param for number in order if important[number]),
        pairs=()
        if many
        else tuple(Pair(params[one].name, params[other].name, share) for (one, other), share in ranked),
        contour=_contour(params, scales, fit, first, sign * largest) if len(first) > 1 else None,
    )


Estimate = Callable[[Sequence[_Scale], Floats], list[float]]


def _judged(
    estimate: Estimate, scales: Sequence[_Scale], values: Floats, seed: int
) -> tuple[list[float], list[tuple[float, float]], list[bool]]:
    """Shares, their intervals, and whether each is more than an inert parameter gets."""
    chance = np.random.default_rng(seed)
    count = len(values)
    shares = estimate(scales, values)
    drawn = []
    for _ in range(RESAMPLES):
        rows = chance.integers(0, count, count)
        drawn.append(estimate([_rows(scale, rows) for scale in scales], values[rows]))
    ends = np.percentile(drawn, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)], axis=0)
    # the interval holds its estimate: shares of trials drawn twice are biased towards each other
    lows, highs = np.minimum(ends[0], shares), np.maximum(ends[1], shares)
    inert = _inert_ped_anova if estimate is _ped_anova else _inert_surface
    usual, most = np.percentile(inert(scales, values, chance), [50, 100 * INERT], axis=0)
    important = [bool(is_so) for is_so in (shares > most) & (lows > usual) & (np.array(shares) >= LEAST_SHARE)]
    return shares, [(float(low), float(high)) for low, high in zip(lows, highs, strict=True)], important


def _inert_surface(scales: Sequence[_Scale], values: Floats, chance: np.random.Generator) -> list[list[float]]:
    """What each parameter gets with its values dealt out anew among the trials, the others as they are."""
    return [
        [
            _surface([*scales[:number], _rows(scale, chance.permutation(len(values))), *scales[number + 1 :]], values)[
                number
            ]
            for number, scale in enumerate(scales)
        ]
        for _ in range(RESAMPLES)
    ]


def _inert_ped_anova(scales: Sequence[_Scale], values: Floats, chance: np.random.Generator) -> list[list[float]]:
    """The same. A parameter's divergence is its own affair, so what is reached is dealt out anew for all at once."""
    known = np.array(_divergences(scales, values))
    dealt = [np.array(_divergences(scales, chance.permutation(values))) for _ in range(RESAMPLES)]
    return [(each / np.maximum(known.sum() - known + each, np.finfo(float).tiny)).tolist() for each in dealt]


def _rows(scale: _Scale, rows: np.typing.NDArray[np.int64]) -> _Scale:
    return scale._replace(units=scale.units[rows])


def _scale(param: Parameter, values: Sequence[Value]) -> _Scale:
    if not param.choices:
        numbers, ends = np.array(values, np.float64), np.array([param.low, param.high], np.float64)
        if param.log:
            numbers, ends = np.log(numbers), np.log(ends)
        every = levels(param)
        known = None if not every else (np.log(every) if param.log else np.array(every, np.float64))
        spread = ends[1] - ends[0]
        return _Scale((numbers - ends[0]) / spread, 0, None if known is None else (known - ends[0]) / spread, numbers)
    as_numbers = [_number(choice) for choice in param.choices]
    if None in as_numbers:
        units = np.array([param.choices.index(str(value)) for value in values], np.float64)
        return _Scale(units, len(param.choices), None, None)
    # in order: 8, 16 and 32 are as far from each other as they are meant
    order = sorted(number for number in as_numbers if number is not None)
    numbers = np.array([_number(str(value)) for value in values], np.float64)
    steps = np.linspace(0.0, 1.0, len(order))
    return _Scale(np.interp(numbers, order, steps), 0, steps, numbers)


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _terms(scale: _Scale) -> Floats:
    """Columns that are orthonormal over the values searched: line and curve, or a contrast for each choice."""
    if scale.codes:
        ones = np.concatenate([np.ones((scale.codes, 1)), np.eye(scale.codes)[:, :-1]], axis=1)
        contrasts: Floats = np.linalg.qr(ones)[0][:, 1:] * math.sqrt(scale.codes)
        return contrasts[scale.units.astype(np.int64)]
    centred = 2 * scale.units - 1
    if scale.levels is None:
        return np.stack([math.sqrt(3) * centred, math.sqrt(5) * (3 * centred**2 - 1) / 2], axis=1)
    ends = 2 * scale.levels - 1
    order = min(2, len(ends) - 1)
    q, r = np.linalg.qr(np.vander(ends, order + 1, increasing=True))
    made: Floats = np.linalg.solve(r.T, np.vander(centred, order + 1, increasing=True).T).T * math.sqrt(len(q))
    return made[:, 1:]


class _Fit(NamedTuple):
    owners: list[frozenset[int]]  # the parameters that each term is of
    weights: Floats  # of the terms
    mean: float  # of what is reached where all terms are 0: over the values searched, not over the trials
    total: float  # the variance of surface and residual

    def share(self, is_asked: Callable[[frozenset[int]], bool]) -> float:
        """Of the variance, in the terms whose parameters are asked for."""
        asked = np.array([is_asked(owner) for owner in self.owners])
        return float((self.weights[asked] ** 2).sum() / self.total) if self.total > 0 else 0.0


def _columns(scales: Sequence[_Scale]) -> tuple[list[Floats], list[frozenset[int]], int]:
    """(terms over the trials, the parameters that each is of, how many of them are of one alone and come first)."""
    parts = [_terms(scale) for scale in scales]
    columns = [part[:, column] for part in parts for column in range(part.shape[1])]
    owners = [frozenset({number}) for number, part in enumerate(parts) for _ in range(part.shape[1])]
    alone = len(columns)
    firsts = [part if scale.codes else part[:, :1] for scale, part in zip(scales, parts, strict=True)]
    for one, other in itertools.combinations(range(len(scales)), 2):
        products = itertools.product(firsts[one].T, firsts[other].T)
        columns += [first * second for first, second in products]
        owners += [frozenset({one, other})] * (firsts[one].shape[1] * firsts[other].shape[1])
    return columns, owners, alone


def _fitted(scales: Sequence[_Scale], values: Floats) -> _Fit:
    columns, owners, alone = _columns(scales)
    kept = len(columns) if len(columns) <= len(values) * TERMS_SHARE else alone
    table = np.stack(columns[:kept], axis=1)
    means, mean = table.mean(axis=0), float(values.mean())
    table, centred = table - means, values - mean
    ridge = RIDGE * len(values) * np.eye(kept)
    weights = np.linalg.solve(table.T @ table + ridge, table.T @ centred)
    rest = centred - table @ weights
    total = float((weights**2).sum() + rest @ rest / max(len(values) - 1, 1))
    return _Fit(owners[:kept], weights, mean - float(means @ weights), total)


def _surface(scales: Sequence[_Scale], values: Floats) -> list[float]:
    fit = _fitted(scales, values)
    return [fit.share(lambda owner, number=number: number in owner) for number in range(len(scales))]  # type: ignore[misc]


def _pairs(fit: _Fit) -> list[tuple[tuple[int, int], float]]:
    """Pairs of parameters that decide something together, with their share, the largest first."""
    every = {(min(owner), max(owner)) for owner in fit.owners if len(owner) == 2}
    shares = [(pair, fit.share(lambda owner, pair=pair: owner == set(pair))) for pair in every]  # type: ignore[misc]
    return sorted((each for each in shares if each[1] >= LEAST_SHARE), key=lambda each: (-each[1], each[0]))


def _contour(
    params: Sequence[Parameter], scales: Sequence[_Scale], fit: _Fit, pair: Sequence[int], scale: float
) -> Contour:
    """The surface over two parameters; terms of all others are 0 on average. `scale` gives the metric its unit back."""
    sides = [_side(params[number], scales[number]) for number in pair]
    across, up = (each.ravel() for each in np.meshgrid(*(units for units, _ in sides)))
    placed = dict(zip(pair, (across, up), strict=True))
    grid = [one._replace(units=placed.get(number, np.zeros(len(across)))) for number, one in enumerate(scales)]
    reached = np.full(len(across), fit.mean)
    for column, owner, weight in zip(_columns(grid)[0], fit.owners, fit.weights, strict=False):
        if owner <= set(pair):
            reached += weight * column
    shape = (len(sides[1][0]), len(sides[0][0]))
    first, second = (params[number].name for number in pair)
    rows = (reached.reshape(shape) * scale).tolist()
    return Contour(first, second, sides[0][1], sides[1][1], tuple(map(tuple, rows)), fit.share(lambda _: True))


def _side(param: Parameter, scale: _Scale) -> tuple[Floats, tuple[Value, ...]]:
    """Places along a parameter, as `_Scale.units` has them, and the values that these are."""
    if scale.codes:
        return np.arange(scale.codes, dtype=np.float64), param.choices
    if param.choices:
        assert scale.levels is not None
        return scale.levels, tuple(sorted(param.choices, key=float))
    few = scale.levels is not None and len(scale.levels) <= CONTOUR_CELLS
    units = scale.levels if few and scale.levels is not None else (np.arange(CONTOUR_CELLS) + 0.5) / CONTOUR_CELLS
    ends = np.array([param.low, param.high], np.float64)
    found = np.exp(np.interp(units, [0, 1], np.log(ends))) if param.log else np.interp(units, [0, 1], ends)
    return units, tuple(found.tolist())


def _ped_anova(scales: Sequence[_Scale], values: Floats) -> list[float]:
    found = _divergences(scales, values)
    total = math.fsum(found)
    return [each / total if total > 0 else 0.0 for each in found]


def _divergences(scales: Sequence[_Scale], values: Floats) -> list[float]:
    rows = np.stack([scale.units for scale in scales], axis=1)
    return ped_anova(rows.tolist(), [scale.codes for scale in scales], values.tolist())


def _correlations(numbers: Floats | None, reached: Floats) -> tuple[float | None, float | None]:
    """Pearson's and Spearman's; None of what has no order or does not vary."""
    if numbers is None or np.ptp(numbers) == 0 or np.ptp(reached) == 0:
        return None, None
    frame = pl.DataFrame({"a": numbers, "b": reached})
    pearson, spearman = (frame.select(pl.corr("a", "b", method=method)).item() for method in ("pearson", "spearman"))
    return _finite(pearson), _finite(spearman)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
