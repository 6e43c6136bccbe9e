"""What the run learned: each series in short, where it breaks or changes, and what happened in the same steps.

Series are the curves that pages and tables show (`curves.py`): those that are stored, and the time of a step, its
samples per second and the memory held. What is found of one rank's series stands for all: of the lowest that has it;
what is not finite, and spikes, are looked for on the first 16.

`spikes` and `levels` judge a series by itself: where it leaps and comes back, or goes on at another level. They are
robust, as a loss is noisy and falls: what is found must stand far beyond the noise and the trend around it, and a
healthy run gives no alarm. Positions are those of `values`.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec.structs import replace
from numpy.lib.stride_tricks import sliding_window_view

from stepscope.analyze import curves
from stepscope.analyze.curves import Curve
from stepscope.analyze.happenings import SCALE, Happenings, joined
from stepscope.analyze.input.batches import alarms
from stepscope.engine.journal import event_data, place_of
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import Place
from stepscope.model.metrics import (
    RATES,
    Accumulation,
    Clipping,
    Happening,
    LevelChange,
    MetricFacts,
    NonFinite,
    Scaling,
    Spike,
    Watched,
)
from stepscope.read.text import integer
from stepscope.tables.arrays import Floats, Int64
from stepscope.tables.metrics import FOUND, LOSS, NORM, NORM_CLIPPED, UNDIVIDED, is_loss, ratio_to_logged
from stepscope.tables.schema import Tables

WINDOW = 200  # values before, that a spike is held against
LEAST_BEFORE = 30  # with fewer the spread is not known to better than a third
SCORE = 8.0  # robust standard deviations: normal noise reaches 5 once in a million values, heavy tails 7
RECENT = 50  # of these, which alone tell a series that fell fast before
FALLEN = 2.0  # times that the first of the window are above the last
LOG_SCORE = 6.0  # of logarithms, whose noise has no heavier tail than the normal one
TAIL = 1.5  # times what the highest of `WINDOW` values was above the usual; of fewer, which know less of a tail, more
PART = 100  # values that a longer tail is told by: what 200 have not shown, a converged loss may do now and then
PARTS = 20  # of these, before
LIKE = 10.0  # times what is usual: the level of a part that was like now
LEVELLED = 1.3  # times that the first half of such a part is above the second, at most: a fall is no tail
LONG_TAIL = 2.0  # times the highest of those parts above their usual
SMALLEST = 0.1  # of the upper quartile of the first values: a loss near 0 leaps by large factors, and means nothing
LONGEST = 20  # values; what lasts longer is another level
MAX_CANDIDATES = 1_000
BLOCK = 50  # values that one window judges roughly

SIGMA = 1.4826  # the median distance of what is above the median as a standard deviation (of a normal distribution)
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
        size = float(np.median(np.abs(before[-WINDOW:])))  # of a series about 0 the size alone is a level
        goes_on = bool(found) and at - found[-1][-1] <= 2
        least = max(SMALLEST * start, SMALLEST_CHANGE * size)
        # what has been 0 so far has no size to leap from
        if score < (SCORE / 2 if goes_on else SCORE) or own[at] - usual < least or not least:
            continue
        if not goes_on and own[at] - usual < LONG_TAIL * _long_tail(before, size):
            continue
        taken[at], scores[at] = True, (usual, score)
        if goes_on:
            found[-1].append(at)
            if at - found[-1][0] >= LONGEST:  # no spike, and what is usual from now on
                taken[found[-1][0] : at + 1] = False
        else:
            found.append([at])
    made = []
    for group in found:
        if group[-1] - group[0] < LONGEST:
            top = max(group, key=own.__getitem__)
            made.append(Leap(int(places[group[0]]), group[-1] - group[0] + 1, float(own[top]), *scores[top]))
    return made


def _long_tail(before: Floats, size: float) -> float:
    """How far above its median a part of the values before went that was like the last ones, and did not fall."""
    parts = before[len(before) % PART :].reshape(-1, PART)
    if not len(parts):
        return 0.0
    early, late = np.median(np.abs(parts).reshape(-1, 2, PART // 2), axis=2).T
    like = (np.median(np.abs(parts), axis=1) <= LIKE * size) & (early <= LEVELLED * late)
    return float((parts.max(axis=1) - np.median(parts, axis=1))[like].max(initial=0.0))


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
    if history.min() <= 0:
        return _above(value, history), usual
    has_fallen = float(np.median(history[:RECENT])) >= FALLEN * float(np.median(history[-RECENT:]))
    scores = (
        min(_above(value, before), _above(math.log(value), np.log(before)) * SCORE / LOG_SCORE)
        for before in (history, history[-RECENT:])[: 1 + has_fallen]
        if value > 0
    )
    return max(scores, default=0.0), usual


def _above(value: float, history: Floats) -> float:
    """By the spread about the line through the medians of both halves: a series that falls fast is not noisy."""
    half = len(history) // 2
    early, late = (float(np.median(part)) for part in (history[:half], history[half:]))
    line = early + (late - early) * (np.arange(len(history)) - half / 2) / half
    rest = history - line
    usual = max(late, float(line[-1]))
    over = rest - np.median(rest)
    spread = SIGMA * float(np.median(over[over >= 0]))  # below, a loss near 0 has a tail of logarithms
    # where most values are equal, a part of their size that no rounding reaches
    score = (value - usual) / max(spread, 1e-3 * abs(usual), 1e-12)
    tail = TAIL * math.sqrt(WINDOW / len(history))
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


PROCESSES = 16
SOURCES = ("backward", "clipping", "scaler")  # of what training itself made, in the order in which a pass makes it
STAGES = {"backward": "forward", "clipping": "backward", "scaler": "scaler"}
NORM_SCALED = "train/grad_norm_scaled"
SEARCH = 20  # updates: GradScaler starts at 2**16 and halves its scale, which is 1 after as many as 16 that it left out
SAME_LOSS = 0.5  # of the updates: one whose last batches are fewer may have a single pass
ZEROS, RATIOS = "watch/zeros/", "watch/update_ratio/"
MAX_SPIKES, MAX_CHANGES = 50, 50
TIMES = 10.0  # a change by more is told as a factor
STEP_MS, RATE = "perf/step_ms", "perf/samples_per_s"
NAMES = {
    STEP_MS: "step time",
    RATE: "samples per second",
    LOSS: "loss",
    NORM: "gradient norm",
    NORM_SCALED: "gradient norm (scaled)",
}
MEMORY = {curves.ALLOCATED: "memory of the device", curves.PRIVATE: "memory of the process"}


def facts(tables: Tables, labelled: LabelledSteps) -> MetricFacts | None:
    """None of a run of which neither metrics nor training steps are known."""
    return None if tables.metrics.is_empty() and labelled.frame.is_empty() else _Run(tables, labelled).facts()


class _Run:
    """What the facts have in common."""

    def __init__(self, tables: Tables, labelled: LabelledSteps) -> None:
        self._tables, self._labelled = tables, labelled
        self._near: dict[str | None, Happenings] = {}

    def facts(self) -> MetricFacts:
        return MetricFacts(
            series=tuple(map(curves.summary, self._all)),
            non_finite=self._non_finite(),
            spikes=tuple(self._spikes()),
            changes=tuple(self._changes()),
            clipping=self._clipping(),
            scaling=self._scaling(),
            accumulation=tuple(self._accumulation()) or None,
            zeros=tuple(_watched(self._all, ZEROS)),
            update_ratios=tuple(_watched(self._all, RATIOS)),
        )

    # -------------------------------------------------------------------------------------------------- series

    @cached_property
    def _all(self) -> list[Curve]:
        """The table, by name, then by rank."""
        found = curves.made(self._tables, self._tables.metrics)
        return sorted(found, key=lambda one: (one.name, one.rank, one.process))

    @cached_property
    def _own(self) -> list[Curve]:
        """Those that training itself made: of losses, norms and scales."""
        return [one for one in self._all if one.source in SOURCES]

    def _of(self, name: str) -> Curve | None:
        """The series of the lowest rank that has one."""
        return next((one for one in self._all if one.name == name), None)

    @cached_property
    def _train(self) -> pl.DataFrame:
        """The training steps of the lowest rank, by start."""
        own = (pl.col("kind") == "train") & pl.col("start_ns").is_not_null()
        frame = self._labelled.frame.filter(own).sort("rank", "process", "start_ns")
        return next(iter(frame.partition_by("process", maintain_order=True)), frame)

    def _measured(self) -> list[Curve]:
        """What steps took, warm-up left out, and the memory held after them."""
        if self._train.is_empty():
            return []
        metrics, lead = self._tables.metrics, pl.col("process") == self._train["process"][0]
        timed = curves.timed(self._labelled).filter(lead & (pl.col("kind") == "train") & ~pl.col("warmup"))
        steps = curves.performance(timed, metrics, only=(STEP_MS, RATE))
        found = curves.beside(metrics, steps, curves.memory(self._tables))
        memory = pl.col("name").str.contains(rf"^sys/([^/]*\.)?({'|'.join(MEMORY)})$")
        return curves.made(self._tables, found.filter(lead & (pl.col("name").is_in([STEP_MS, RATE]) | memory)))

    def _happenings(self, process: str | None) -> Happenings:
        if process not in self._near:
            self._near[process] = Happenings(self._tables, self._labelled, process)
        return self._near[process]

    # -------------------------------------------------------------------------------------------- what stands out

    @cached_property
    def _skipped(self) -> dict[str | None, set[int]]:
        """By process the steps in which a GradScaler left an update out."""
        found: dict[str | None, set[int]] = {}
        for row, _ in event_data(self._tables, "scaler_skip"):
            if row["step"] is not None:
                found.setdefault(row["process"], set()).add(row["step"])
        return found

    def _non_finite(self) -> NonFinite | None:
        found = []
        for one in self._all:
            if one.name == NORM_CLIPPED or one.name.startswith(RATES):
                continue
            values = one.values
            if one.source == "clipping" and one.process in self._skipped:  # a GradScaler's search for a scale
                values = np.where(np.isin(one.steps, list(self._skipped[one.process])), 0.0, values)
            for at in np.flatnonzero(~np.isfinite(values))[:1].tolist():
                order = SOURCES.index(one.source) if one.source in SOURCES else len(SOURCES)
                step, later = one.step(at), order == len(SOURCES)
                found.append((step if step is not None else math.inf, later, int(one.times_ns[at]), order, one, at))
        if not found:
            return None
        *_, one, at = min(found, key=lambda each: each[:4])
        step, process, stage = one.step(at), one.process, STAGES.get(one.source, "logged")
        loss = next((each for each in self._all if each.name == LOSS and each.process == process), None)
        after = loss.values[loss.times_ns >= one.times_ns[at]] if loss is not None else np.zeros(0)
        has_norm = any(each.source == "clipping" and each.process == process for each in self._all)
        of_step = (
            alarm.origin
            for alarm in alarms(self._tables)
            if (alarm.process, alarm.step) == (process, step) and isinstance(alarm.value, str)
        )
        origin = next(of_step, None)
        seen = origin is not None and origin.where in ("forward", "inputs")
        first = loss is not None and one.name == LOSS and at == 0
        made = NonFinite(
            name=one.name,
            value=str(float(one.values[at])),
            stage=stage,
            step=step,
            rank=one.rank,
            losses=len(after),
            losses_lost=int((~np.isfinite(after)).sum()),
            sure=stage != "forward" or has_norm or first or seen,
            skipped=step in self._skipped.get(process, ()),
            place=self._places.get(process, {}).get(one.name),
            origin=origin,
            happenings=self._happenings(process).near(step),
            sentence="",
        )
        return replace(made, sentence=_sentence(made))

    @cached_property
    def _places(self) -> dict[str | None, dict[str, Place]]:
        """By process and name the line that calls backward; of `train/loss` the one with most passes."""
        most: dict[tuple[str, str], int] = {}
        found: dict[str | None, dict[str, Place]] = {}
        for row, data in event_data(self._tables, "metric_series"):
            place, count = place_of(data), integer(data.get("values")) or 0
            if data.get("source") != "backward" or place is None:
                continue
            own = found.setdefault(row["process"], {})
            own[f"{LOSS}/{posixpath.basename(place.file)}:{place.line}"] = place
            if count > most.get((row["process"], LOSS), 0):
                most[row["process"], LOSS] = count
                own[LOSS] = place
        return found

    def _spikes(self) -> Iterator[Spike]:
        """Of losses and norms, in order of steps."""
        wanted = [one for one in self._own if one.name in (NORM, NORM_SCALED, LOSS) or one.name.startswith(f"{LOSS}/")]
        processes = sorted({(one.rank, one.process) for one in wanted})[:PROCESSES]
        found: dict[tuple[str, int], tuple[Curve, Leap]] = {}  # by name and step, once for all ranks
        for one in wanted:
            if (one.rank, one.process) in processes:
                for leap in spikes(one.values):
                    found.setdefault((one.name, int(one.steps[leap.at])), (one, leap))
        in_order = sorted(found.values(), key=lambda each: (each[0].steps[each[1].at], each[0].name))
        for one, leap in in_order[:MAX_SPIKES]:
            step = one.step(leap.at)
            told = self._happenings(one.process).near(step, before=2, after=0)
            size = f", {leap.value / leap.usual:.3g} times the usual {leap.usual:.4g}" if leap.usual > 0 else ""
            lasting = f" for {leap.lasts} values" if leap.lasts > 1 else ""
            text = f"{_named(one.name)} leaps to {leap.value:.4g} in step {step}{lasting}{size}; {joined(told)}"
            yield Spike(one.name, one.rank, step, leap.lasts, leap.value, leap.usual, min(leap.score, 1e6), told, text)

    def _changes(self) -> Iterator[LevelChange]:
        """Of losses, norms and what steps take, in order of steps."""
        lead = {one.name: one for one in reversed(self._own) if one.name in (NORM, NORM_SCALED, LOSS)}
        found = [
            (one, level)
            for one in (*lead.values(), *self._measured())
            for level in levels(one.values, SCALES if one.source in (*SOURCES, curves.STEPS) else SLOW_SCALES)
        ]
        walls = [one.steps[level.at] for one, level in found if one.name == STEP_MS]
        found.sort(key=lambda each: (each[0].steps[each[1].at], each[0].name))
        told_so_far = 0
        for one, level in found:
            step = int(one.steps[level.at])
            batches = tuple(_batches(self._train, step))
            # a rate says something in addition to the time of a step only where batches have another size
            if one.name == RATE and (not batches or any(abs(step - wall) <= level.near for wall in walls)):
                continue
            told_so_far += 1
            if told_so_far > MAX_CHANGES:
                break
            # what was left out between the two levels belongs to the change
            gap = 1 if one.source in SOURCES else step - int(one.steps[level.at - 1])
            told = self._happenings(one.process).near(step, before=max(level.near, gap), after=1)
            told = (*told, *batches) if one.source == curves.STEPS else told
            before, after = level.before, level.after
            change = (after - before) / abs(before) if before else math.copysign(1e6, after)
            large = before and abs(change) >= TIMES
            size = f"is {change + 1:.3g} times as high" if large else f"changes by {change:+.0%}"
            values = f"{_value(one.name, before)} -> {_value(one.name, after)}"
            text = f"{_named(one.name)} {size} from step {step} on ({values}); {joined(told)}"
            yield LevelChange(one.name, one.rank, step, before, after, change, told, text)

    # ------------------------------------------------------------------------------------------ clipping and scale

    def _clipping(self) -> Clipping | None:
        clipped = self._of(NORM_CLIPPED)
        if clipped is None:
            return None
        norm = next(one for one in self._all if one.name == NORM and one.process == clipped.process)
        # a norm is written once, and once more for each time it was clipped by
        at = np.searchsorted(norm.times_ns, clipped.times_ns, side="right") - 1
        before, after = norm.values[np.maximum(at, 0)], clipped.values
        known = np.isfinite(before) & (at >= 0)
        if not known.any():
            return None
        before, after = before[known], after[known]
        cut = after < before * (1 - 1e-4)
        factor = float(np.median(after[cut] / before[cut])) if cut.any() else None
        return Clipping(len(before), float(cut.mean()), float(np.median(before)), factor)

    def _scaling(self) -> Scaling | None:
        scale = self._of(SCALE)
        if scale is None:
            return None
        values, of_steps = scale.values[SEARCH:], scale.steps[SEARCH:]
        skipped = int(np.isin(of_steps, list(self._skipped.get(scale.process, ()))).sum())
        finite = values[np.isfinite(values)]
        below = np.flatnonzero(values < 1)
        return Scaling(
            updates=len(values),
            skipped=skipped,
            skipped_share=skipped / len(values) if len(values) else 0.0,
            least=float(finite.min()) if len(finite) else None,
            last=float(finite[-1]) if len(finite) else None,
            collapsed_step=int(of_steps[below[0]]) if len(below) else None,
        )

    def _accumulation(self) -> Iterator[Accumulation]:
        """A loss of several passes; what is no mean in the table was divided, as far as anything tells."""
        loss, total, mean = (self._of(name) for name in (LOSS, f"{LOSS}_sum", f"{LOSS}_mean"))
        if loss is None or total is None or mean is None:
            return
        if not len(loss.values) == len(total.values) == len(mean.values):
            return
        known = np.isfinite(loss.values) & np.isfinite(total.values) & (mean.values != 0)
        passes = np.rint(total.values[known] / mean.values[known])
        if not len(passes) or (usual := int(np.median(passes))) < 2:
            return
        place = self._places.get(loss.process, {}).get(LOSS)
        node = ""  # the last operator of what backward was called on
        for row, data in event_data(self._tables, "metric_series"):
            if (row["process"], place_of(data)) == (loss.process, place):
                node = str(data.get("node") or "")
                if data.get("scaled"):  # the gradients are, by whoever makes the passes
                    return
        own = (one for one in self._all if one.process == loss.process and one.source not in FOUND)
        logged = [one for one in own if is_loss(one.name.removesuffix(f" ({one.source})"))]
        ratio = ratio_to_logged(total.times_ns, total.values, logged, usual)
        trained = (pl.col("process") == loss.process) & (pl.col("kind") == "train")
        fed = self._tables.steps.filter(trained)["fetches"].median()
        # Passes over one batch may be of several losses, as those of no loader are of an episode's moments.
        if (ratio is None or ratio.of is None) and (fed == 1 or not (fed or UNDIVIDED.search(node))):
            return
        yield Accumulation(
            name=LOSS,
            passes=usual,
            updates=len(passes),
            share=float((passes == usual).mean()),
            divided=bool(np.isclose(loss.values[known], total.values[known]).mean() > SAME_LOSS),
            node=node,
            logged=ratio.name if ratio is not None else None,
            logged_ratio=ratio.value if ratio is not None and ratio.of is not None else None,
            place=place,
        )


def _watched(series: Sequence[Curve], prefix: str) -> Iterator[Watched]:
    """Of each name the later half of its values, on the lowest rank that has it."""
    seen = set()
    for one in series:
        half = one.values[len(one.values) // 2 :]
        half = half[np.isfinite(half)]
        if one.name.startswith(prefix) and one.name not in seen and len(half):
            seen.add(one.name)
            yield Watched(one.name.removeprefix(prefix), float(np.median(half)), len(half))


def _batches(train: pl.DataFrame, step: int) -> Iterator[Happening]:
    """Another size of the batches from this step on."""
    steps, samples = train["step"].to_numpy(), train["samples"].cast(pl.Float64).fill_null(math.nan).to_numpy()
    before, after = samples[steps < step][-10:], samples[steps >= step][:10]
    if np.isfinite(before).any() and np.isfinite(after).any():
        old, new = float(np.nanmedian(before)), float(np.nanmedian(after))
        if old != new:
            yield Happening("batch", step, f"batches of {old:g} -> {new:g} samples")


def _sentence(found: NonFinite) -> str:
    where = f" of step {found.step}" if found.step is not None else ""
    by = {"forward": "the forward pass", "backward": "the backward pass", "scaler": "the scaler"}.get(found.stage)
    text = f"{_named(found.name)}{where} is {found.value}, the first value that is not finite"
    text += f": it shows first in {by}" if by else ": only what the script logs tells of it"
    if not found.sure:
        text += ", or in the backward pass before, whose gradients' norm nobody took"
    if found.origin is not None and found.origin.where is not None:
        text += f"; {found.origin.sentence}"
    if found.losses > 1:
        lost = "all" if found.losses_lost == found.losses else f"{found.losses_lost:,} of"
        text += f"; {lost} {found.losses:,} losses from there on are not finite"
    if found.skipped:
        text += "; GradScaler left the update out"
    return f"{text}; {joined(found.happenings)}" if found.happenings else text


def _named(name: str) -> str:
    """As a sentence that begins with it calls the series."""
    if name.startswith(f"{LOSS}/"):
        return f"Loss of {name.removeprefix(f'{LOSS}/')}"
    text = NAMES.get(name) or MEMORY.get(re.split(r"[/.]", name)[-1]) or name
    return text[:1].upper() + text[1:]


def _value(name: str, value: float) -> str:
    if name == STEP_MS:
        return f"{value:.4g} ms"
    return f"{value / 2**20:,.0f} MiB" if name.endswith("_bytes") else f"{value:.4g}"
