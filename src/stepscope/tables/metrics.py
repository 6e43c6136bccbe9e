"""The table of metrics: what was found in the training by itself, logged by the script or tapped from its log calls.

The loss of an update is the sum of what `backward` was called on since the update before; where a script accumulates
and does not divide, their mean. Which of the two, a framework tells, or the root's last node, or else what the script
logs as its loss. Both are kept beside it. What an optimizer's step evaluates again is no loss of another batch. Of
several optimizers, the loss is that of the one with most updates, and of those that go on with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import NamedTuple, Protocol

import numpy as np
import polars as pl

from stepscope.read.raw import RawRank, RawSeries, Row
from stepscope.read.text import number, string
from stepscope.tables.arrays import NONE, Bools, Floats, Int64, unique
from stepscope.tables.journal import step_at
from stepscope.tables.schema import SCHEMAS, empty

LOSS = "train/loss"
NORM, NORM_CLIPPED = "train/grad_norm", "train/grad_norm_clipped"
RATE = re.compile(r"train/lr/(\d+)\.(.+)")  # of any optimizer but the first
BACKWARD, CLIPPING = "backward", "clipping"  # sources
# Sources that are found in the training. What the script logs between steps, as a validation's loss, is of the last.
FOUND = {BACKWARD, "optimizer", CLIPPING, "scaler", "loader", "watch"}
DIVIDING = {"HF Trainer", "Lightning", "Accelerate", "Composer", "torchtitan"}  # frameworks that divide the loss
CLIP_EPSILON = 1e-6  # torch's own, in `clip_grads_with_norm_`
DIVISION = "DivBackward"
UNDIVIDED = re.compile(r"Loss|Mean|Entropy|KlDiv")  # last nodes of loss functions, which divide by their own numbers
# Words of a name that scripts log the loss of their training by, one of which is "loss".
LOSS_WORDS = {"loss", "train", "training", "trainer", "batch", "step", "total", "mean", "avg", "running", "opt"}
LEAST_LOGGED = 10  # values of it: the median of fewer says little where each is of one part of an update
CONSTANT = 0.5  # of the logarithm of the number of parts: the quartiles of the ratio are no further apart
NEAR = 0.25  # of it: so near to the sum or the mean is meant to be that


class Curve(NamedTuple):
    name: str
    source: str
    times_ns: Int64
    values: Floats
    steps: Int64 | None = None  # where they are told


def metrics_table(ranks: Iterable[RawRank]) -> pl.DataFrame:
    """One row per value of each rank, in order of time."""
    frames = [_of_rank(rank) for rank in ranks if rank.metrics]
    return pl.concat(frames) if frames else empty("metrics")


def _of_rank(rank: RawRank) -> pl.DataFrame:
    rows = [(step["start_ns"], step["wall_ns"], step["step"], step["fetches"] or 0) for step in rank.steps]
    starts, walls, numbers, fetches = (np.array([row[column] for row in rows], np.int64) for column in range(4))
    losses = [series for series in rank.metrics if series.source == BACKWARD and series.updates is not None]
    curves = [curve for series in rank.metrics if series.source != BACKWARD for curve in _curves(series)]
    backward = np.empty(0, np.int64)
    if losses:
        passes = _passes(losses, starts, walls, fetches)
        backward = passes.times_ns
        frameworks = {str(event.get("name")) for event in rank.journal if event["kind"] == "framework"}
        logged = [curve for curve in curves if curve.source not in FOUND and is_loss(curve.name)]
        curves = list(_following(curves, passes))
        curves += _losses(losses, passes, fetches, frameworks, logged)
    if not curves:  # losses of which nobody knows the updates
        return empty("metrics")
    times = np.concatenate([curve.times_ns for curve in curves])
    order = np.argsort(times, kind="stable")
    which = np.repeat(np.arange(len(curves)), [len(curve.times_ns) for curve in curves])[order]
    times = times[order]
    # A norm is of the backward passes before it: a step without an optimizer may have ended in between.
    clipping = np.array([curve.source == CLIPPING for curve in curves])[which]
    before = np.searchsorted(backward, times, side="right") - 1
    moments = np.where(clipping & (before >= 0), np.append(backward, NONE)[before], times)
    steps = step_at(moments, starts, walls, numbers)
    tapped = np.array([curve.source not in FOUND for curve in curves])[which]
    steps[tapped] = np.append(NONE, numbers)[np.searchsorted(starts, times[tapped], side="right")]
    if any(curve.steps is not None for curve in curves):
        own = [np.full(len(curve.times_ns), NONE) if curve.steps is None else curve.steps for curve in curves]
        told = np.concatenate(own)[order]
        steps = np.where(told >= 0, told, steps)
    columns = {
        "rank": np.full(len(times), rank.rank),
        "process": pl.repeat(rank.name, len(times), eager=True),
        "step": pl.Series(steps).set(pl.Series(steps == NONE), None),
        "time_ns": times,
        "name": pl.Series([curve.name for curve in curves], dtype=pl.String).gather(which),
        "value": np.concatenate([curve.values for curve in curves])[order],
        "source": pl.Series([curve.source for curve in curves], dtype=pl.String).gather(which),
    }
    return pl.DataFrame(columns, schema=SCHEMAS["metrics"])


def _curves(series: RawSeries) -> Iterator[Curve]:
    """The series; of a norm that gradients were clipped by, the norm afterwards as well."""
    if not series.about.get("again"):
        yield Curve(series.name, series.source, series.times_ns, series.values, series.steps)
    most = number(series.about.get("max_norm"))
    if series.source == CLIPPING and series.name == NORM and most is not None:
        with np.errstate(invalid="ignore"):
            clipped = series.values * np.minimum(1.0, most / (series.values + CLIP_EPSILON))
        yield Curve(NORM_CLIPPED, CLIPPING, series.times_ns, clipped)


class _Passes(NamedTuple):
    """Backward passes in order of time, those left out that an optimizer's step made again.

    `sites` are positions in the list of series, of a line that has several stretches its first; `firsts` are positions
    of each update's first pass.
    """

    times_ns: Int64
    values: Floats
    sites: Int64
    optimizers: Int64
    rows: Int64  # of the steps they are in, `NONE` where in none
    firsts: Int64


def _passes(losses: list[RawSeries], starts: Int64, walls: Int64, fetches: Int64) -> _Passes:
    """The passes of all lines, grouped by update: a new one begins with a step and after an optimizer's step."""
    times = np.concatenate([series.times_ns for series in losses])
    order = np.argsort(times, kind="stable")
    times, values = times[order], np.concatenate([series.values for series in losses])[order]
    # Two losses on one line are told apart by what made them.
    lines = [(_place(series.about), _place(series.about, caller=True), _node(series)) for series in losses]
    numbers = [lines.index(line) for line in lines]
    sites = np.repeat(np.array(numbers, np.int64), [len(series.values) for series in losses])[order]
    told = np.concatenate([series.updates for series in losses if series.updates is not None])[order]
    optimizers = [
        np.zeros(len(series.values), np.int64) if series.optimizers is None else series.optimizers for series in losses
    ]
    columns = times, sites, told, np.concatenate(optimizers)[order]
    # Several losses that one call was given are one.
    parts = np.flatnonzero(np.append(True, np.diff(times) | np.diff(sites))[: len(times)])
    times, sites, told, of_optimizers = (column[parts] for column in columns)
    values = np.add.reduceat(values, parts) if len(parts) else values
    updates, inside = np.where(told < 0, -1 - told, told), told < 0
    rows = step_at(times, starts, walls, np.arange(len(starts), dtype=np.int64))
    # A pass in no step is of the update that follows: one before an evaluation in its midst, or left over by the epoch
    # before. Before the first update it may be a trial, unless that used more batches than it has passes.
    ahead = pl.Series(rows).replace(NONE, None).fill_null(strategy="backward").fill_null(NONE).to_numpy()
    own = np.append(fetches > np.bincount(rows[rows >= 0], minlength=len(fetches)), np.False_)
    ahead = np.where((updates > 0) | own[ahead], ahead, rows)
    begins = np.ones(len(times), np.bool_)
    begins[1:] = (updates[1:] != updates[:-1]) | (ahead[1:] != ahead[:-1])
    again = np.zeros(len(times), np.bool_)
    again[1:] = inside[1:] & inside[:-1] & ~begins[1:]
    kept = ~again
    return _Passes(
        times[kept], values[kept], sites[kept], of_optimizers[kept], rows[kept],
        np.flatnonzero(begins[kept]),
    )  # fmt: skip


def _losses(
    losses: list[RawSeries], passes: _Passes, fetches: Int64, divided_by: set[str], logged: list[Curve]
) -> Iterator[Curve]:
    """`train/loss` of the optimizer with most updates; where several lines call backward, a curve of each as well."""
    firsts = passes.firsts
    if not len(firsts):
        return
    lasts = np.append(firsts[1:], len(passes.times_ns)) - 1
    counts = lasts - firsts + 1
    several = np.add.reduceat((passes.sites != np.repeat(passes.sites[lasts], counts)).astype(np.int64), firsts) > 0
    fed = np.where(passes.rows[lasts] == NONE, 0, fetches[passes.rows[lasts]] if len(fetches) else 0)
    # Passes of one line, or of as many batches, are parts of one mean; those of several lines are added by intent.
    accumulates = (counts > 1) & (~several | (fed >= 2))
    optimizers = np.maximum.reduceat(passes.optimizers, firsts)
    own = _of_one_loss(optimizers, passes.rows[lasts], passes.sites[lasts])
    most = int(counts[own].max())
    total = np.add.reduceat(passes.values, firsts)
    mean = total / counts
    times = passes.times_ns[lasts[own]]
    divides = bool(divided_by & DIVIDING)
    if most > 1 and not divides:
        lines = [losses[site] for site in unique(passes.sites[lasts[own]])]
        told = {_divides(one, most) for one in lines}
        ratio = None
        if told <= {None, False} and None in told:
            ratio = ratio_to_logged(times, total[own], logged, int(np.median(counts[own])))
        if ratio is not None and ratio.of is not None:
            divides = ratio.of == 1
        else:
            divides = True in told or any(
                _divides(one, most) is None and _node(one).startswith(DIVISION) for one in lines
            )
    yield Curve(LOSS, BACKWARD, times, total[own] if divides else np.where(accumulates, mean, total)[own])
    if most > 1:
        yield Curve(f"{LOSS}_sum", BACKWARD, times, total[own])
        yield Curve(f"{LOSS}_mean", BACKWARD, times, mean[own])
    if not accumulates.any():
        yield from _by_line(losses, passes)


def _of_one_loss(optimizers: Int64, rows: Int64, sites: Int64) -> Bools:
    """Which updates are those of the optimizer with most of them, or of others that go on with its loss.

    Those are never in a step with it, and take turns on the same lines, or train before or after it, as models of a
    cross-validation do.
    """
    numbers, firsts, sizes = np.unique(optimizers, return_index=True, return_counts=True)
    own = np.zeros(len(optimizers), np.bool_)
    chosen: list[tuple[int, int]] = []
    for at in np.lexsort((firsts, -sizes)):
        mine = optimizers == numbers[at]
        span = int(firsts[at]), int(np.flatnonzero(mine)[-1])
        apart = all(span[1] < first or last < span[0] for first, last in chosen)
        alike = not np.isin(rows[mine & (rows != NONE)], rows[own]).any()
        if alike and (apart or np.isin(sites[mine], sites[own]).all()):
            own |= mine
            chosen.append(span)
    return own


def _following(curves: list[Curve], passes: _Passes) -> Iterator[Curve]:
    """The curves; rates of an optimizer that begins after another one's last update go on with that one's.

    As after a search for the rate, in a script's next training, or in a cross-validation.
    """
    numbers, firsts = np.unique(passes.optimizers, return_index=True)
    ends: list[int] = []  # the last pass of those that share a place
    places: dict[str, int] = {}
    for first, optimizer in sorted(zip(firsts.tolist(), numbers.tolist(), strict=True)):
        place = places[str(optimizer)] = next((at for at, end in enumerate(ends) if end < first), len(ends))
        ends[place : place + 1] = [int(np.flatnonzero(passes.optimizers == optimizer)[-1])]
    for curve in curves:
        parts = RATE.fullmatch(curve.name)
        if parts is not None and parts[1] in places and "0" in places:
            place = places[parts[1]]
            curve = curve._replace(name=f"train/lr/{f'{place}.' if place else ''}{parts[2]}")
        yield curve


def _by_line(losses: list[RawSeries], passes: _Passes) -> Iterator[Curve]:
    used = unique(passes.sites).tolist()
    places = {site: _place(losses[site].about) for site in used}
    shared = {place for place in places.values() if list(places.values()).count(place) > 1}
    names = {
        site: _place(losses[site].about, caller=True) if place in shared else place for site, place in places.items()
    }
    if len(set(names.values())) < 2:
        return
    for name in dict.fromkeys(names.values()):
        own = np.isin(passes.sites, [site for site in used if names[site] == name])
        yield Curve(f"{LOSS}/{name}", BACKWARD, passes.times_ns[own], passes.values[own])


def _place(about: Row, caller: bool = False) -> str:
    called = about.get("caller")
    if caller and isinstance(called, list) and len(called) > 1:
        about = {"file": called[0], "line": called[1]}
    file = string(about.get("file"))
    return f"{PurePath(file).name}:{about.get('line')}" if file else "?"


def _node(series: RawSeries) -> str:
    return string(series.about.get("node")) or ""


def _divides(series: RawSeries, passes: int) -> bool | None:
    """Whether the root of a pass was divided by the number of passes of an update; None where that is not known.

    What each pass divides by anew, such as the number of its own tokens, is no number of passes; what changes with the
    update alone, as the tokens of all its batches, may be.
    """
    node, told = _node(series), series.about.get("factors")
    factors = [number(factor) for factor in (told if isinstance(told, list) else [series.about.get("factor")])]
    if node.startswith("MulBackward"):
        return all(abs((factor or 0.0) * passes - 1) < 1e-6 for factor in factors)
    if not node.startswith(DIVISION):
        return False if UNDIVIDED.search(node) else None
    if all(factor == passes for factor in factors):
        return True
    new = sum(one != other for one, other in pairwise(factors))
    return False if new > len(factors) / 2 else None


class Logged(Protocol):
    """A curve that the script logs."""

    @property
    def name(self) -> str: ...
    @property
    def times_ns(self) -> Int64: ...
    @property
    def values(self) -> Floats: ...


class Ratio(NamedTuple):
    """The sum of the losses of an update by what the script logs as `name`, in the median.

    `of` is what it comes to: 1, where the sum is logged, or the number of passes, where their mean is; None where it is
    neither, or not constant.
    """

    name: str
    value: float
    of: int | None


def is_loss(name: str) -> bool:
    """Whether a script calls the loss of its training so, and not that of an evaluation."""
    words = set(re.findall(r"[a-z]+", name.lower()))
    return "loss" in words and words <= LOSS_WORDS


def ratio_to_logged(times_ns: Int64, totals: Floats, logged: Sequence[Logged], passes: int) -> Ratio | None:
    """Of the first that has enough values; each is held against the mean of the updates since the one before it."""
    finite = np.isfinite(totals)
    times, sums = times_ns[finite], np.append(0.0, np.cumsum(totals[finite]))
    for curve in logged:
        until = np.searchsorted(times, curve.times_ns, side="right")
        since = np.append(0, until[:-1])
        known = (until > since) & np.isfinite(curve.values) & (curve.values != 0)
        means = (sums[until] - sums[since])[known] / (until - since)[known]
        ratios = means / curve.values[known]
        ratios = ratios[ratios > 0]
        if len(ratios) < LEAST_LOGGED or 2 * len(ratios) < known.sum():
            continue
        low, middle, high = np.quantile(np.log(ratios), (0.25, 0.5, 0.75))
        size = np.log(passes)
        near = (of for of in (1, passes) if abs(middle - np.log(of)) <= NEAR * size)
        of = next(near, None) if high - low <= CONSTANT * size else None
        return Ratio(curve.name, float(np.exp(middle)), of)
    return None
