"""A series of values by itself: where it stops being finite, leaps and comes back, or goes on at another level.

All of it is robust, as a loss is noisy and falls: what is found must stand far beyond the noise and the trend around
it, and a healthy run gives no alarm. Positions are those of `values`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from stepscope.tables.arrays import Floats, Int64

WINDOW = 200  # values before, that a spike is held against
LEAST_BEFORE = 30  # with fewer the spread is not known to better than a third
SCORE = 8.0  # robust standard deviations: normal noise reaches 5 once in a million values, heavy tails 7
RECENT = 50  # of these, which alone tell a series that fell fast before; their tail is short, so twice as far above it
FALLEN = 2.0  # times that the first of the window are above the last
TAIL = 1.5  # times what the highest of the values before was above the usual: heavy tails have such neighbours
PART = 100  # values that a longer tail is told by: what 200 have not shown, a converged loss may do now and then
PARTS = 20  # of these, before
LIKE = 10.0  # times what is usual: the level of a part that was like now
LEVELLED = 1.3  # times that the first half of such a part is above the second, at most: a fall is no tail
LONG_TAIL = 2.0  # times the highest of those parts above their usual
SMALLEST = 0.1  # of the upper quartile of the first values: a loss near 0 leaps by large factors, and means nothing
LONGEST = 20  # values; what lasts longer is another level
MAX_CANDIDATES = 1_000
BLOCK = 50  # values that one window judges roughly

SIGMA = 1.4826  # a median distance from the median as a standard deviation (of a normal distribution)
QUARTILES = 1.349  # what the quartiles of a normal distribution lie apart, in standard deviations

SCALES = (10, 20, 80, 320)  # values on either side; a long one finds a small change, a short one the exact place
SLOW_SCALES = (5, *SCALES)  # of what is read once a second and hardly noisy, as memory is
STEP_SCORE = 7.5  # standard errors of the difference of two medians; thousands of places are looked at
MEDIAN_ERROR = 1.253  # the standard error of a median by that of the mean (of a normal distribution)
ABRUPT = 2.0  # times what the level changes by from window to window on both sides: a trend changes by as much there
UNUSUAL = 8.0  # medians of all such differences of the series, by its level: one that wanders is always on its way
SMALLEST_CHANGE = 0.1  # of the level before: runs of one script differ by a few percent
POINTS = 5_000  # that are looked at; longer series by medians of neighbours first


class Leap(NamedTuple):
    """A spike: its first value, how many it lasts, its highest, and what was usual."""

    at: int
    lasts: int
    value: float
    usual: float
    score: float


class Level(NamedTuple):
    """Where a new level begins, and how near (in values) that is known."""

    at: int
    before: float
    after: float
    near: int


# --------------------------------------------------------------------------------------------------------- spikes


def spikes(values: Floats) -> list[Leap]:
    """Values far above the 200 before, on the scale of the values and on that of their logarithms."""
    places = np.flatnonzero(np.isfinite(values))
    own = values[places]
    if len(own) <= LEAST_BEFORE:
        return []
    start = float(np.sort(np.abs(own[:LEAST_BEFORE]))[3 * LEAST_BEFORE // 4])
    taken = np.zeros(len(own), np.bool_)
    found: list[list[int]] = []
    scores: dict[int, tuple[float, float]] = {}
    for at in _candidates(own)[:MAX_CANDIDATES].tolist():
        first = max(0, at - 2 * PART * PARTS)
        before = own[first:at][~taken[first:at]][-PART * PARTS :]
        score, usual = _score(float(own[at]), before[-WINDOW:])
        goes_on = bool(found) and at - found[-1][-1] <= 2
        least = max(SMALLEST * start, SMALLEST_CHANGE * abs(usual))
        if score < (SCORE / 2 if goes_on else SCORE) or own[at] - usual < least:
            continue
        if not goes_on and own[at] - usual < LONG_TAIL * _long_tail(before, usual):
            continue
        taken[at], scores[at] = True, (score, usual)
        if goes_on:
            found[-1].append(at)
            if at - found[-1][0] >= LONGEST:  # no spike, and what is usual from now on
                taken[found[-1][0] : at + 1] = False
        else:
            found.append([at])
    leaps = [group for group in found if group[-1] - group[0] < LONGEST]
    made = []
    for group in leaps:
        top = max(group, key=own.__getitem__)
        score, usual = scores[top]
        made.append(Leap(int(places[group[0]]), group[-1] - group[0] + 1, float(own[top]), usual, score))
    return made


def _long_tail(before: Floats, usual: float) -> float:
    """How far above its median a part of the values before went that was like the last ones, and did not fall."""
    parts = before[len(before) % PART :].reshape(-1, 2, PART // 2)
    if not len(parts):
        return 0.0
    early, late = np.median(parts, axis=2).T
    middle = np.median(parts.reshape(-1, PART), axis=1)
    like = (np.abs(middle) <= LIKE * abs(usual)) & (np.abs(early) <= LEVELLED * np.abs(late))
    return float((parts.reshape(-1, PART).max(axis=1) - middle)[like].max(initial=0.0))


def _candidates(own: Floats) -> Int64:
    """Values that stand out of a window before their block; each is then held against its own."""
    limits = np.full(len(own), np.inf)
    starts = np.arange(LEAST_BEFORE, len(own), BLOCK)
    for width in (LEAST_BEFORE, WINDOW):  # the long one is wide where the series falls, the short one is rough
        early, full = starts[starts < width].tolist(), starts[starts >= width]
        rows = [np.quantile(own[:start], (0.25, 0.5, 0.75)) for start in early]
        if len(full):
            windows = sliding_window_view(own, width)[full - width]
            rows += list(np.quantile(windows, (0.25, 0.5, 0.75), axis=1).T)
        for start, (low, middle, high) in zip((*early, *full.tolist()), rows, strict=True):
            block = slice(start, start + BLOCK)
            limits[block] = np.minimum(limits[block], middle + SCORE / 2 * (high - low) / QUARTILES)
    return np.flatnonzero(own > limits)


def _score(value: float, history: Floats) -> tuple[float, float]:
    """(standard deviations above what `history` leads to expect, its median); 0 where heavy tails explain it."""
    usual = float(np.median(history))
    if len(history) < LEAST_BEFORE:
        return 0.0, usual
    score, windows = 0.0, [(history, TAIL)]
    if float(np.median(history[:RECENT])) >= FALLEN * float(np.median(history[-RECENT:])):
        windows.append((history[-RECENT:], 2 * TAIL))
    for before, tail in windows:
        above = _above(value, before, tail)
        if usual > 0 and before.min() > 0 and above:
            above = min(above, _above(math.log(value), np.log(before), tail))
        score = max(score, above)
    return score, usual


def _above(value: float, history: Floats, tail: float) -> float:
    """By the spread about the line through the medians of both halves: a series that falls fast is not noisy."""
    half = len(history) // 2
    early, late = (float(np.median(part)) for part in (history[:half], history[half:]))
    line = early + (late - early) * (np.arange(len(history)) - half / 2) / half
    rest = history - line
    usual = max(late, float(line[-1]))
    spread = SIGMA * float(np.median(np.abs(rest - np.median(rest))))
    # where most values are equal, a part of their size that no rounding reaches
    score = (value - usual) / max(spread, 1e-3 * abs(usual), 1e-12)
    return score if value - usual >= tail * float(rest.max()) else 0.0


# ---------------------------------------------------------------------------------------------------------- levels


def levels(values: Floats, scales: Sequence[int] = SCALES) -> list[Level]:
    """Where the series goes on at another level, for as many values as the least of `scales`: in order of place."""
    places = np.flatnonzero(np.isfinite(values))
    raw = values[places]
    each = -(-len(raw) // POINTS)
    own = raw if each <= 1 else np.median(raw[: len(raw) // each * each].reshape(-1, each), axis=1)
    found: list[tuple[int, int]] = []  # place, scale
    for scale in scales:
        for at in _jumps(own, scale):
            if all(abs(at - other) > max(scale, known) for other, known in found):
                found.append((at, scale))
    edges = [0, *sorted(at for at, _ in found), len(own)]
    made = []
    for at, scale in sorted(found):
        index = edges.index(at)
        # exact to the value among the raw ones, within what is this change's own
        low, high = max(edges[index - 1], at - 2 * scale) * each, min(edges[index + 1], at + 2 * scale) * each
        first = max(low + 1, (at - scale) * each)
        place = _between(raw[low:high], range(first - low, min(high, (at + scale) * each) - low)) + low
        before, after = float(np.median(raw[low:place])), float(np.median(raw[place:high]))
        if abs(after - before) >= SMALLEST_CHANGE * abs(before):
            made.append(Level(int(places[place]), before, after, max(2, scale // 4) * each))
    return made


def _jumps(own: Floats, scale: int) -> Iterator[int]:
    """Places where medians of `scale` values before and after differ by more than noise and trend explain."""
    count = len(own) - 3 * scale + 1  # places with two windows before, and one after
    if count < 1:
        return
    low, middle, high = np.quantile(sliding_window_view(own, scale), (0.25, 0.5, 0.75), axis=1)
    at = np.arange(2 * scale, 2 * scale + count)
    early, before, after = middle[at - 2 * scale], middle[at - scale], middle[at]
    late = np.append(middle, np.full(scale, np.nan))[at + scale]
    jump = after - before
    trend = np.abs(before - early) + np.nan_to_num(np.abs(late - after))
    spread = np.maximum((high - low)[at - scale], (high - low)[at]) / QUARTILES
    error = np.maximum(spread * MEDIAN_ERROR * math.sqrt(2.0 / scale), 1e-9 * np.abs(before))
    size = np.abs(jump)
    counts = (
        (size > 0)
        & (size >= STEP_SCORE * error)
        & (size >= ABRUPT * trend)
        & (size >= SMALLEST_CHANGE * np.abs(before))
    )
    relative = size / np.maximum(np.abs(before), 1e-300)
    places = np.flatnonzero(counts)
    for group in np.split(places, np.flatnonzero(np.diff(places) > scale) + 1) if len(places) else ():
        place = group[np.argmax((size - trend)[group])]
        # a series that goes through 0 has no usual size of its changes but that of all
        others = relative[np.abs(at - at[place]) > scale] if own.min() > 0 else relative
        if not len(others) or relative[place] >= UNUSUAL * float(np.median(others)):
            yield int(at[place])


def _between(values: Floats, places: range) -> int:
    """Of `places`, where parting the values leaves the least distance from the medians of both parts."""
    left, right = np.median(values[: places.start]), np.median(values[min(places.stop, len(values) - 1) :])
    cost = np.concatenate(([0.0], np.cumsum(np.abs(values - left) - np.abs(values - right))))
    return places.start + int(np.argmin(cost[places.start : places.stop]))
