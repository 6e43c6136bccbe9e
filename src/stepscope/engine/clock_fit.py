"""The numerics of `engine.clocks`: what clocks are ahead by the ends of the same calls, robustly, and breaks in lines.

A unit is a clock between two of its steps. All times are floats of ns; `tau` is a time in halves of the window.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from numpy.lib.stride_tricks import sliding_window_view

from stepscope.tables.arrays import Bools, Floats, Int64

DEVIATION = 1.4826  # of a normal distribution, by its median distance from the middle
OUTLIER_SIGMAS = 6.0  # 1 to 5 % of single ends jump by milliseconds
_HUBER = 1.5
_TURNS, _LAST_TURNS = 10, 3
_FIRST_SCALE_NS = 100_000.0
_LEAST_SCALE_NS = 500.0  # of clocks that count microseconds
_ITERATIONS = 200
_DAMPING, _SETTLED_NS = 1e-7, 0.01
ROBUST = 1.5  # times the error of least squares: what is robust, of ends that are late rather than early

BREAK_NS = 100_000.0  # by so much one line must miss what two lines meet
BREAK_SIGMAS = 3.0  # of single values, by the distances of neighbours, which no line decides
BREAK_SHARE = 40.0  # what two lines take off the squares, by the mean square that they leave: chance makes up to 25
_BINS = 64
_LEAST_BINS = 4  # on either side of a break


class Ends(Struct, frozen=True):
    """When units left calls; arrays of one length, a row for each pair. `weight` is 1 for times of devices."""

    call: Int64
    unit: Int64
    end: Floats
    tau: Floats
    step: Int64
    weight: Floats


class Fit(Struct, frozen=True):
    """ahead = offset + rate x tau, on the clock of the units' middle. Arrays by unit, but for the last two.

    `sigma`: robust deviation of a unit's single ends. `rate_error`: standard error. `residual`: of each of `ends`.
    `left`: by call, when it was left, NaN where it tells nothing.
    """

    ends: Ends
    offset: Floats
    rate: Floats
    rate_error: Floats
    sigma: Floats
    count: Int64
    residual: Floats
    left: Floats

    @property
    def known(self) -> Bools:
        found: Bools = self.count > 0
        return found


def fit(ends: Ends, units: int, calls: int, usual_rate: float, fixed: Bools | None = None) -> Fit:
    """Robust least squares over offset and rate of each unit and the end of each call, in time linear in the ends.

    Args:
        usual_rate: what rates are expected within, ns per unit of `tau`; decides where the ends do not.
        fixed: units that stay at 0.
    """
    offset, rate = np.zeros(units), np.zeros(units)
    count = np.bincount(ends.unit, minlength=units)
    left = np.full(calls, np.nan)
    if not len(ends.call):
        nothing = np.full(units, np.nan)
        return Fit(ends, offset, rate, nothing, nothing, count, ends.end, left)
    codes, call = np.unique(ends.call, return_inverse=True)
    free = np.ones(units) if fixed is None else (~fixed).astype(np.float64)
    weight, scale = ends.weight, _FIRST_SCALE_NS
    for turn in range(_TURNS + _LAST_TURNS):
        apart = ends.end - offset[ends.unit] - rate[ends.unit] * ends.tau
        if turn:
            residual, _ = _centred(apart, call, weight)
            size = np.abs(residual)
            scale = max(DEVIATION * float(np.median(size)), _LEAST_SCALE_NS)
            if turn < _TURNS:
                weight = ends.weight * np.minimum(1.0, _HUBER * scale / np.maximum(size, 1e-3))
            else:
                # a unit that scatters more than usual, or steps, tells less of when a call was left
                own = np.maximum(DEVIATION * medians(ends.unit, size, units), scale)[ends.unit]
                weight = ends.weight * np.where(size <= OUTLIER_SIGMAS * own, (scale / own) ** 2, 1e-9)
        change = _solved(ends, call, apart, weight / scale**2, rate, usual_rate, free)
        offset, rate = offset + change[0], rate + change[1]
    apart = ends.end - offset[ends.unit] - rate[ends.unit] * ends.tau
    residual, at = _centred(apart, call, weight)
    left[codes] = at
    sigma = np.maximum(DEVIATION * medians(ends.unit, np.abs(residual), units), _LEAST_SCALE_NS)
    mean = np.bincount(ends.unit, ends.tau, minlength=units) / np.maximum(count, 1)
    base = np.bincount(ends.unit, (ends.tau - mean[ends.unit]) ** 2, minlength=units)
    error = 1.0 / np.sqrt(1.0 / usual_rate**2 + base / (ROBUST * np.nan_to_num(sigma, nan=np.inf)) ** 2)
    return Fit(ends, offset, rate, error, sigma, count, residual, left)


def _centred(values: Floats, call: Int64, weight: Floats) -> tuple[Floats, Floats]:
    """Distances from each call's own mean, as large as if that mean were not made of them; and the means."""
    total = np.bincount(call, weight)
    mean = np.bincount(call, weight * values) / total
    share = np.minimum(weight / total[call], 0.75)
    return (values - mean[call]) / np.sqrt(1.0 - share), mean


def _solved(
    ends: Ends, call: Int64, apart: Floats, weight: Floats, rate: Floats, usual_rate: float, free: Floats
) -> tuple[Floats, Floats]:
    """Change of offsets and rates that least squares ask for; calls' ends are eliminated, not solved for."""
    from scipy.sparse.linalg import LinearOperator, cg

    units, unit, tau = len(free), ends.unit, ends.tau
    total = np.bincount(call, weight)
    ridge = 1.0 / usual_rate**2

    def onto(values: Floats) -> Floats:
        values = weight * (values - (np.bincount(call, weight * values) / total)[call])
        both = np.stack([np.bincount(unit, part, minlength=units) * free for part in (values, values * tau)])
        found: Floats = both.reshape(-1)
        return found

    def product(vector: Any) -> Floats:
        offset, slope = np.reshape(vector, (2, units)) * free
        found = onto(offset[unit] + slope[unit] * tau)
        found[units:] += ridge * slope
        return found + damping * np.ravel(vector)

    diagonal = np.concatenate(
        [np.bincount(unit, weight, minlength=units), np.bincount(unit, weight * tau**2, minlength=units) + ridge]
    )
    inverse = 1.0 / np.where(diagonal > 0, diagonal, 1.0)
    # all clocks together may be anywhere: without this, rounding errors would take them far
    damping = _DAMPING * diagonal
    wanted = onto(apart)
    wanted[units:] -= ridge * rate * free
    if float(np.abs(wanted * inverse).max()) < _SETTLED_NS:
        return np.zeros(units), np.zeros(units)
    shape = (2 * units, 2 * units)
    operator = LinearOperator(shape, matvec=product, dtype=np.float64)
    conditioner = LinearOperator(shape, matvec=lambda vector: inverse * np.ravel(vector), dtype=np.float64)
    change, _ = cg(operator, wanted, M=conditioner, maxiter=_ITERATIONS)
    return change[:units] * free, change[units:] * free


def broken(x: Floats, y: Floats) -> tuple[int, float] | None:
    """Where a series in order of `x` goes on by another line, and by how much one line misses it.

    The place is a position; None where one line tells the series as well.
    """
    bins = min(len(x), _BINS)
    if bins < 2 * _LEAST_BINS + 2:
        return None
    place = np.arange(len(x)) * bins // len(x)
    at, series = medians(place, x, bins), medians(place, y, bins)
    noise = DEVIATION * float(np.median(np.abs(np.diff(series)))) / np.sqrt(2)
    # an outlier is no step, nor are two beside each other
    series[2:-2] = np.median(sliding_window_view(series, 5), axis=1)
    series[:2], series[-2:] = series[2], series[-3]
    series = series - series.mean()
    forward, backward = _squares(at, series), _squares(at[::-1], series[::-1])[::-1]
    splits = np.arange(_LEAST_BINS, bins - _LEAST_BINS + 1)
    two = forward[splits - 1] + backward[splits]
    best = int(splits[np.argmin(two)])
    squares = float(two.min())
    one, both = (
        np.concatenate([_on_line(at[part], series[part]) for part in parts])
        for parts in ((slice(None),), (slice(best), slice(best, None)))
    )
    missed = float(np.abs(one - both).max())
    taken = float(forward[-1]) - squares
    if taken * (bins - 4) < BREAK_SHARE * squares or missed < max(BREAK_NS, BREAK_SIGMAS * noise):
        return None
    return int(np.searchsorted(place, best)), missed


def line(x: Floats, y: Floats) -> tuple[float, float]:
    """Slope and value at 0 of the line by least squares; level where all `x` are the same."""
    middle = float(x.mean())
    spread = float(((x - middle) ** 2).sum())
    slope = float(((x - middle) * y).sum()) / spread if spread > 0 else 0.0
    return slope, float(y.mean()) - slope * middle


def _on_line(x: Floats, y: Floats) -> Floats:
    slope, start = line(x, y)
    return slope * x + start


def _squares(x: Floats, y: Floats) -> Floats:
    """What the best line through the first k points leaves of squares, for each k, at position k - 1."""
    x = x - x[0]
    n = np.arange(1, len(x) + 1)
    sx, sy, sxx, sxy, syy = (np.cumsum(part) for part in (x, y, x * x, x * y, y * y))
    xx, xy, yy = sxx - sx**2 / n, sxy - sx * sy / n, syy - sy**2 / n
    return np.maximum(yy - np.where(xx > 0, xy**2 / np.where(xx > 0, xx, 1.0), 0.0), 0.0)


def medians(key: Int64, values: Floats, keys: int) -> Floats:
    """The middle value of each key from 0 on, NaN of one without any."""
    low, high = middles(key, values, keys)
    return (low + high) / 2


def middles(key: Int64, values: Floats, keys: int) -> tuple[Floats, Floats]:
    """The lower and the upper middle value of each key from 0 on, NaN of one without any."""
    order = np.lexsort((values, key))
    count = np.bincount(key, minlength=keys)
    first = np.cumsum(count) - count
    ordered = np.append(values[order], np.nan)
    none = len(ordered) - 1
    low = np.where(count > 0, first + (count - 1) // 2, none)
    return ordered[low], ordered[np.where(count > 0, first + count // 2, none)]


def low_quantiles(key: Int64, values: Floats, keys: int, share: float) -> Floats:
    """The value below which `share` of each key's finite ones lie, the least of few; inf of a key without any."""
    finite = np.isfinite(values)
    key, values = key[finite], values[finite]
    count = np.bincount(key, minlength=keys)
    first = np.cumsum(count) - count
    ordered = np.append(values[np.lexsort((values, key))], np.inf)
    at = np.where(count > 0, first + (share * count).astype(np.int64), len(ordered) - 1)
    found: Floats = ordered[at]
    return found


def greatest_of_others(key: Int64, values: Floats) -> Floats:
    """For each row the greatest value of the other rows with its key, -inf where it is alone."""
    order = np.lexsort((values, key))
    ordered, found = key[order], np.empty(len(values))
    is_last = np.append(ordered[1:] != ordered[:-1], True) if len(ordered) else np.zeros(0, bool)
    last = np.flatnonzero(is_last)
    group = np.cumsum(is_last) - is_last
    best = values[order[last]]
    second = np.where(np.bincount(group, minlength=len(last)) > 1, values[order[np.maximum(last - 1, 0)]], -np.inf)
    found[order] = np.where(is_last, second[group], best[group])
    return found
