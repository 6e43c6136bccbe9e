"""Sampled time of main threads by stage of the run: import, compilation, start, warm-up, steady state, everything else.

What a thread imports or compiles is told by its frames, at whatever time. All else goes by time: by what the steps say
of the moments in which a stack was seen, where those are known, else of the segment it was sampled in, in proportion.
Samples are whole and none is lost: those of all stages together are those of the main threads of ranks.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.context import Context
from stepscope.analyze.hotspots.idle import idle_sampled
from stepscope.engine.step_labels import STEADY as STEADY_STEP
from stepscope.model import PHASES
from stepscope.model.sampled import StageTime
from stepscope.tables import phases
from stepscope.tables.arrays import Floats, Int64
from stepscope.tables.stages import COMPILE, IMPORT

STARTUP, WARMUP, STEADY, OTHER = "startup", "warmup", "steady", "other"
STAGES = (IMPORT, COMPILE, STARTUP, WARMUP, STEADY, OTHER)
_TIMED = (STARTUP, WARMUP, STEADY, OTHER)  # the columns of `_Clock.lengths`
_OF_REASON = {STEADY_STEP: STEADY, "first_batch": STEADY, "warmup": WARMUP, "compile": WARMUP}
_IN_STEPS = tuple(phase for phase in PHASES if phase != phases.OTHER)  # stacks that can only be seen inside steps
_STACK = ("host", "file", "pid", "thread", "node")


def facts(context: Context) -> tuple[StageTime, ...]:
    """The stages that have samples, in order of a run; none where no main thread of a rank was sampled."""
    main = (pl.col("role") == "rank") & pl.col("main_thread").fill_null(False) & (pl.col("samples") > 0)
    rows = context.tables.stacks.filter(main)
    if rows.is_empty():
        return ()
    samples = rows["samples"].to_numpy()
    split = _by_stage(context, rows, samples)
    waiting = split[rows["waiting"].fill_null(False).to_numpy()].sum(axis=0)
    waits_known = idle_sampled(context.tables) is not False
    return tuple(
        StageTime(
            stage=stage,
            samples=int(count),
            share=int(count) / int(samples.sum()),
            waiting_share=int(waits) / int(count) if waits_known else None,
        )
        for stage, count, waits in zip(STAGES, split.sum(axis=0), waiting, strict=True)
        if count
    )


def _by_stage(context: Context, rows: pl.DataFrame, samples: Int64) -> Int64:
    """Samples of each row by stage, in the order of `STAGES`."""
    found = np.zeros((rows.height, len(STAGES)), np.int64)
    named = rows["stage"].to_numpy()
    for column, stage in enumerate((IMPORT, COMPILE)):
        found[named == stage, column] = samples[named == stage]
    rest = np.flatnonzero(found.sum(axis=1) == 0)
    found[rest, 2:] = _whole(samples[rest], _weights(context, rows[rest]))
    return found


def _weights(context: Context, rows: pl.DataFrame) -> Floats:
    """By row how the time it was seen in divides into the stages of `_TIMED`; nothing but "other" without times."""
    weights = np.zeros((rows.height, len(_TIMED)))
    clocks = {process: _Clock(part) for process, part in _steps(context)}
    process = rows["process"].to_numpy()
    exact = _seen(context, clocks, rows)
    start, end = (rows[name].fill_null(-1).to_numpy() for name in ("start_ns", "end_ns"))
    in_steps = rows["phase"].is_in(_IN_STEPS).fill_null(False).to_numpy()
    for name, clock in clocks.items():
        own = np.flatnonzero((process == name) & (start >= 0) & (end >= 0))
        weights[own] = clock.lengths(start[own], end[own])
        # what is done in steps alone was not done before or between them
        inside = own[in_steps[own]]
        only = clock.lengths(start[inside], end[inside], steps_only=True)
        weights[inside] = np.where(only.sum(axis=1, keepdims=True) > 0, only, weights[inside])
    weights = np.where(exact.sum(axis=1, keepdims=True) > 0, exact, weights)
    weights[weights.sum(axis=1) <= 0, _TIMED.index(OTHER)] = 1.0
    return weights


def _seen(context: Context, clocks: dict[str, _Clock], rows: pl.DataFrame) -> Floats:
    """The same from the times in which each stack was seen; zeros where none are known."""
    nothing = np.zeros((rows.height, len(_TIMED)))
    stretches = context.tables.stretches
    parts = []
    for name, clock in clocks.items():
        own = stretches.filter((pl.col("process") == name) & (pl.col("role") == "rank"))
        lengths = clock.lengths(own["start_ns"].to_numpy(), own["end_ns"].to_numpy())
        columns = [pl.Series(stage, lengths[:, number]) for number, stage in enumerate(_TIMED)]
        parts.append(own.select(_STACK).with_columns(columns).group_by(_STACK).agg(pl.col(_TIMED).sum()))
    if not parts:
        return nothing
    sums = pl.concat(parts).group_by(_STACK).agg(pl.col(_TIMED).sum())
    joined = rows.select(_STACK).join(sums, on=_STACK, how="left", nulls_equal=True, maintain_order="left")
    found: Floats = joined.select(pl.col(_TIMED).fill_null(0.0)).to_numpy()
    return found


def _steps(context: Context) -> list[tuple[str, pl.DataFrame]]:
    """(process, its steps with times): `start_ns`, `end_ns` and `stage` of each."""
    frame = context.labelled.frame.filter(pl.col("start_ns").is_not_null() & pl.col("process").is_not_null())
    kind = "train" if (frame["kind"] == "train").any() else "eval"
    stage = pl.col("reason").replace_strict(_OF_REASON, default=OTHER, return_dtype=pl.String)
    steps = frame.select(
        "process",
        "start_ns",
        end_ns=pl.col("start_ns") + pl.col("wall_ns"),
        stage=pl.when(pl.col("kind") == kind).then(stage).otherwise(pl.lit(OTHER)),
    ).sort("process", "start_ns")
    return [(str(part["process"][0]), part) for part in steps.partition_by("process", maintain_order=True)]


class _Sum(Struct, frozen=True):
    """Intervals that do not overlap, and the time they cover before each of them."""

    starts: Int64
    ends: Int64
    before: Int64

    def until(self, moments: Int64) -> Int64:
        """Covered time before each moment."""
        if not len(self.starts):
            return np.zeros(len(moments), np.int64)
        last = np.searchsorted(self.starts, moments, side="right") - 1
        at = np.maximum(last, 0)
        inside = np.minimum(moments, self.ends[at]) - self.starts[at]
        covered: Int64 = np.where(last >= 0, self.before[at] + inside, 0)
        return covered


class _Clock:
    """What the steps of one process say of any time."""

    def __init__(self, steps: pl.DataFrame) -> None:
        starts, ends = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
        ends = np.minimum(ends, np.append(starts[1:], ends[-1:]))  # steps of different kinds may lie in each other
        stage = steps["stage"].to_numpy()
        self._first = int(starts[0])
        self._sums = {name: _sum(starts[stage == name], ends[stage == name]) for name in _TIMED}

    def lengths(self, start: Int64, end: Int64, *, steps_only: bool = False) -> Floats:
        """ns of each interval in the stages of `_TIMED`. `steps_only`: "other" has steps of other kinds alone."""
        end = np.maximum(end, start + 1)
        found = np.zeros((len(start), len(_TIMED)))
        for column, name in enumerate(_TIMED):
            found[:, column] = self._sums[name].until(end) - self._sums[name].until(start)
        if not steps_only:
            found[:, 0] = np.clip(np.minimum(end, self._first) - start, 0, None)
            found[:, -1] = end - start - found[:, :-1].sum(axis=1)
        return found


def _sum(starts: Int64, ends: Int64) -> _Sum:
    lengths = ends - starts
    return _Sum(starts, ends, np.cumsum(lengths) - lengths)


def _whole(samples: Int64, weights: Floats) -> Int64:
    """Whole samples by weight, which add up to those of each row: what is left over goes to the largest fractions."""
    ideal = samples[:, None] * (weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300))
    found = np.floor(ideal).astype(np.int64)
    found = np.minimum(found, samples[:, None])
    left = samples - found.sum(axis=1)
    order = np.argsort(-(ideal - found), axis=1, kind="stable")
    place = np.argsort(order, axis=1, kind="stable")
    whole: Int64 = found + (place < left[:, None])
    return whole
